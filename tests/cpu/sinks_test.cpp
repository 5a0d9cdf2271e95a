// Attention sinks: one more logit per query head, without a value, counted once however the tokens are split.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kvonce/kvonce.hpp"

namespace kvonce {
namespace {

constexpr std::int64_t kGroup = 5;
constexpr std::int64_t kKvHeads = 3;
constexpr std::int64_t kHeads = kGroup * kKvHeads;
constexpr std::int64_t kDim = 64;

struct Result {
  std::vector<float> out;  // [kHeads, q_len, kDim]
  std::vector<float> lse;  // [kHeads, q_len]
};

// q = 0, so every visible key has the logit 0; V = 1.
Result attend_with_sinks(const Device& device, std::int64_t q_len, std::int64_t kv_len, std::int64_t chunk_tokens,
                         const std::vector<float>& sinks, std::int64_t window = 0) {
  Problem problem;
  problem.window = window;
  problem.q_len = q_len;
  problem.num_q_heads = kHeads;
  problem.num_kv_heads = kKvHeads;
  problem.head_dim_qk = kDim;
  problem.max_kv_len = kv_len;
  problem.has_sinks = true;
  PlanOptions options;
  options.chunk_tokens = chunk_tokens;
  const Plan plan = make_plan(problem, device, options);
  const std::vector<float> q(static_cast<std::size_t>(kHeads * q_len * kDim), 0.0F);
  const std::vector<float> kv(static_cast<std::size_t>(kKvHeads * kv_len * kDim + 1), 1.0F);
  Result result;
  result.out.assign(q.size(), std::numeric_limits<float>::quiet_NaN());
  result.lse.assign(static_cast<std::size_t>(kHeads * q_len), std::numeric_limits<float>::quiet_NaN());
  std::vector<std::uint8_t> workspace(plan.workspace_bytes());
  Inputs inputs;
  inputs.q = {q.data(), kHeads * q_len * kDim, q_len * kDim, kDim};
  inputs.k = {kv.data(), kKvHeads * kv_len * kDim, kv_len * kDim, kDim};
  inputs.v = inputs.k;
  inputs.sinks = sinks.data();
  Outputs outputs;
  outputs.out = result.out.data();
  outputs.out_seq_stride = kHeads * q_len * kDim;
  outputs.out_head_stride = q_len * kDim;
  outputs.out_token_stride = kDim;
  outputs.lse = result.lse.data();
  outputs.lse_seq_stride = kHeads * q_len;
  outputs.lse_head_stride = q_len;
  outputs.lse_token_stride = 1;
  attend(plan, inputs, outputs, workspace.data(), workspace.size());
  return result;
}

std::vector<Device> usable_targets() {
  std::vector<Device> usable;
  for (const Device& device : devices()) {
    if (device.backend == Backend::cpu && device.unavailable.empty()) usable.push_back(device);
  }
  return usable;
}

TEST(SinksTest, EachHeadsSinkTakesItsShareOnceHoweverTheTokensAreSplit) {
  std::vector<float> sinks;
  for (std::int64_t head = 0; head < kHeads; ++head) sinks.push_back(std::log(static_cast<float>(head + 1)));
  for (const Device& device : usable_targets()) {
    for (const std::int64_t q_len : {1, 2, 3, 8}) {
      for (const std::int64_t chunk_tokens : {16, 64, 1000}) {
        SCOPED_TRACE(device.target + " q_len " + std::to_string(q_len) + " chunk " + std::to_string(chunk_tokens));
        const std::int64_t kv_len = 130;
        const Result result = attend_with_sinks(device, q_len, kv_len, chunk_tokens, sinks);
        for (std::int64_t head = 0; head < kHeads; ++head) {
          for (std::int64_t token = 0; token < q_len; ++token) {
            const double visible = static_cast<double>(kv_len - q_len + token + 1);
            const double total = visible + static_cast<double>(head + 1);
            const auto row = static_cast<std::size_t>(head * q_len + token);
            for (std::size_t dim = 0; dim < kDim; ++dim) {
              ASSERT_NEAR(result.out[row * kDim + dim], visible / total, 2e-6) << "head " << head << " token " << token;
            }
            ASSERT_NEAR(result.lse[row], std::log(total), 2e-6) << "head " << head << " token " << token;
          }
        }
      }
    }
  }
}

TEST(SinksTest, ChunksOutsideTheWindowAddNothingToASink) {
  std::vector<float> sinks;
  for (std::int64_t head = 0; head < kHeads; ++head) sinks.push_back(std::log(static_cast<float>(head + 1)));
  constexpr std::int64_t kWindow = 20;
  for (const Device& device : usable_targets()) {
    for (const std::int64_t num_chunks : {2, 4, 8}) {
      const Result result = attend_with_sinks(device, 3, 256, 256 / num_chunks, sinks, kWindow);
      for (std::int64_t row = 0; row < kHeads * 3; ++row) {
        const double total = static_cast<double>(kWindow + row / 3 + 1);
        const auto i = static_cast<std::size_t>(row);
        ASSERT_NEAR(result.out[i * kDim], kWindow / total, 2e-6) << device.target << ", " << num_chunks << " chunks";
        ASSERT_NEAR(result.lse[i], std::log(total), 2e-6) << device.target << ", " << num_chunks << " chunks";
      }
    }
  }
}

TEST(SinksTest, WithoutKeysTheSinkIsTheLse) {
  const std::vector<float> sinks(kHeads, 1.5F);
  for (const Device& device : usable_targets()) {
    const Result result = attend_with_sinks(device, 2, 0, 64, sinks);
    for (const float value : result.out) ASSERT_EQ(value, 0.0F);
    for (const float value : result.lse) ASSERT_FLOAT_EQ(value, 1.5F);
  }
}

TEST(SinksTest, ExtremeSinksStayFinite) {
  for (const Device& device : usable_targets()) {
    for (const float sink : {1e38F, 88.0F, -104.0F, -1e38F, -std::numeric_limits<float>::infinity()}) {
      const Result result = attend_with_sinks(device, 1, 100, 64, std::vector<float>(kHeads, sink));
      const float expected = sink > 0.0F ? 0.0F : 1.0F;
      for (const float value : result.out) ASSERT_NEAR(value, expected, 1e-6) << device.target << " sink " << sink;
      for (const float value : result.lse) ASSERT_TRUE(std::isfinite(value)) << device.target << " sink " << sink;
    }
  }
}

}  // namespace
}  // namespace kvonce
