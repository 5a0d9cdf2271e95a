// Where bf16 pairs are multiplied, and where weights are rounded for that: the CPU's choice.
#include <gtest/gtest.h>

#include <string>

#include "kvonce/kvonce.hpp"

namespace kvonce {
namespace {

Device device_with_pairs() {
  Device device;
#ifdef __aarch64__
  device.target = "neon_bf16";
#else
  device.target = "avx512_bf16";
#endif
  device.fast_pair_dot = true;
  return device;
}

Problem problem(DType q, KvFormat v, DType out) {
  Problem p;
  p.num_q_heads = 8;
  p.num_kv_heads = 1;
  p.head_dim_qk = 128;
  p.max_kv_len = 1024;
  p.q_dtype = q;
  p.k_format = KvFormat::bf16;
  p.v_format = v;
  p.out_dtype = out;
  return p;
}

TEST(PairDotTest, WeightsAreRoundedOnlyWhereEverythingIsBf16) {
  const auto chosen = [](const Problem& p, const Device& device) { return make_plan(p, device).policy().pair_dot; };
  const Device device = device_with_pairs();
  const Problem throughout = problem(DType::bf16, KvFormat::bf16, DType::bf16);
  EXPECT_EQ(chosen(throughout, device), 2);
  EXPECT_EQ(chosen(problem(DType::bf16, KvFormat::bf16, DType::f32), device), 1);
  EXPECT_EQ(chosen(problem(DType::bf16, KvFormat::bf16, DType::f16), device), 1);
  EXPECT_EQ(chosen(problem(DType::bf16, KvFormat::f16, DType::bf16), device), 1);
  EXPECT_EQ(chosen(problem(DType::f32, KvFormat::bf16, DType::bf16), device), 0);
  Device slow = device;
  slow.fast_pair_dot = false;
  EXPECT_EQ(chosen(throughout, slow), 0);
}

TEST(PairDotTest, WhatTheFormatsDoNotAllowIsRefused) {
  PlanOptions options;
  options.policy.pair_dot = 2;
  EXPECT_EQ(make_plan(problem(DType::bf16, KvFormat::bf16, DType::f32), device_with_pairs(), options).policy().pair_dot,
            2);
  try {
    make_plan(problem(DType::bf16, KvFormat::f16, DType::bf16), device_with_pairs(), options);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_NE(std::string(error.what()).find("policy.pair_dot: got 2"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("0 or 1"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace kvonce
