// What the policy decides is what the kernel bodies take: planned launches on the emulated bodies, judged by the oracle.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvonce/kvonce.hpp"
#include "metal/metal_plan.hpp"
#include "metal_emulation/emulated_case.hpp"

namespace kvonce {
namespace {

using conformance::CaseResult;
using conformance::CaseSpec;
using conformance::CaseTensors;

struct Geometry {
  std::int64_t num_q_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_dim;
  std::int64_t q_len;
};

// Of the instances that the emulation compiles.
constexpr Geometry kGeometries[] = {
    {3, 3, 128, 1},  {8, 2, 128, 1},   {16, 2, 128, 1}, {16, 2, 64, 1},  {9, 3, 64, 1},  {14, 2, 128, 1},
    {12, 4, 80, 1},  {16, 2, 128, 4},  {6, 2, 64, 5},   {10, 2, 96, 1},  {71, 1, 64, 1}, {4, 2, 64, 1},
    {24, 2, 128, 3}, {130, 1, 128, 1}, {8, 1, 512, 1},  {10, 1, 512, 2},
};

CaseSpec case_of(const Geometry& g, const std::string& policy) {
  CaseSpec spec;
  Problem& p = spec.problem;
  p.num_seqs = 3;
  p.num_q_heads = g.num_q_heads;
  p.num_kv_heads = g.num_kv_heads;
  p.head_dim_qk = g.head_dim;
  p.q_len = g.q_len;
  p.max_kv_len = 301;
  p.q_dtype = p.out_dtype = DType::f16;
  p.k_format = p.v_format = KvFormat::f16;
  spec.kv_lens = {301, 0, 65};
  spec.name = std::to_string(g.num_q_heads) + "q/" + std::to_string(g.num_kv_heads) + "kv d" +
              std::to_string(g.head_dim) + " q=" + std::to_string(g.q_len) + " " + policy;
  spec.options.policy = parse_policy(policy);
  return spec;
}

emulation::Choice choice_of(const metal::Decision& d) {
  emulation::Choice choice;
  choice.body = static_cast<emulation::Body>(static_cast<int>(d.body) - 1);
  choice.row_tile = d.row_tile;
  choice.row_tiles = d.row_tiles;
  choice.token_parts = d.token_parts;
  choice.num_chunks = d.num_chunks;
  choice.chunk_tokens = d.fixed_chunk_tokens;
  choice.merge_simdgroups = d.merge_simdgroups;
  return choice;
}

void check(const CaseSpec& spec) {
  const Problem& p = spec.problem;
  const Plan plan = make_plan(spec.problem, metal_device("apple9", 8), spec.options);
  const metal::Decision& d = dynamic_cast<const metal::MetalPlan&>(*plan.data().backend_plan).decision;
  const emulation::Choice choice = choice_of(d);
  ASSERT_EQ(std::string(to_string(choice.body)), metal::to_string(d.body));
  const CaseTensors tensors(spec);
  const emulation::Launch launch = make_launch(spec.problem, tensors.inputs(), choice);
  EXPECT_EQ(32 * launch.num_simdgroups, d.threads) << spec.name;
  EXPECT_EQ(4 * launch.shared_floats, d.threadgroup_bytes) << spec.name;
  EXPECT_EQ(4 * launch.merge_shared_floats, d.merge_threadgroup_bytes) << spec.name;
  EXPECT_EQ(launch.grid_y, p.num_kv_heads * d.row_blocks) << spec.name;
  EXPECT_EQ(launch.read_factor, plan.read_factor()) << spec.name;
  EXPECT_EQ(launch.num_rows * d.num_chunks * (p.head_dim_qk + 2) * 4,
            static_cast<std::int64_t>(plan.workspace_bytes()));
  const CaseResult result = check_emulated(spec, choice);
  EXPECT_EQ(result.status, CaseResult::passed) << plan.kernel_id() << ", " << result.name << ": " << result.detail;
}

TEST(MetalPlannedLaunchTest, WhatThePolicyChoosesGivesTheRightResult) {
  for (const Geometry& g : kGeometries) check(case_of(g, ""));
}

TEST(MetalPlannedLaunchTest, SoDoesWhatIsAskedOf) {
  for (const char* policy : {"body=1", "body=2", "body=3", "body=2,chunk_tokens=37", "splits=5,simdgroups=1",
                             "body=2,simdgroups=4", "body=1,row_tile=4,rows_per_worker=4", "body=2,splits=90"}) {
    check(case_of({16, 2, 128, 1}, policy));
  }
  check(case_of({7, 1, 192, 2}, "body=2"));
}

TEST(MetalPlannedLaunchTest, SoDoQuantisedCaches) {
  for (const KvFormat format : {KvFormat::mlx_int8, KvFormat::mlx_int4}) {
    for (const Geometry& g : {Geometry{16, 2, 128, 1}, Geometry{14, 2, 128, 3}, Geometry{16, 2, 64, 1}}) {
      CaseSpec spec = case_of(g, "body=2");
      Problem& p = spec.problem;
      p.k_format = p.v_format = format;
      p.quant_group = 64;
      p.scales_dtype = p.q_dtype;
      spec.name += " " + std::string(to_string(format));
      check(spec);
    }
  }
}

}  // namespace
}  // namespace kvonce
