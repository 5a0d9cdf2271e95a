#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "generator.hpp"
#include "kvonce/kvonce.hpp"
#include "metal/metal_plan.hpp"
#include "metal/params.h"

namespace kvonce::metal {
namespace {

Problem problem(std::int64_t num_q_heads, std::int64_t num_kv_heads, std::int64_t head_dim, std::int64_t max_kv_len,
                std::int64_t q_len = 1) {
  Problem p;
  p.num_q_heads = num_q_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim_qk = head_dim;
  p.max_kv_len = max_kv_len;
  p.q_len = q_len;
  p.q_dtype = p.out_dtype = DType::f16;
  p.k_format = p.v_format = KvFormat::f16;
  return p;
}

PlanOptions with(const std::string& policy) {
  PlanOptions options;
  options.policy = parse_policy(policy);
  return options;
}

const Decision& decision(const Plan& plan) {
  return dynamic_cast<const MetalPlan&>(*plan.data().backend_plan).decision;
}

void expect_error(const std::function<void()>& call, ErrorCode code, const std::string& words) {
  try {
    call();
    ADD_FAILURE() << "accepted: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << "'" << words << "' in: " << error.what();
  }
}

struct Geometry {
  std::int64_t num_q_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_dim;
};
constexpr Geometry kSeed[] = {{32, 32, 128}, {32, 8, 128}, {32, 4, 128}, {64, 8, 64}};

TEST(MetalPolicyTest, NoLaunchExceedsTheLimitsOfTheGpu) {
  conformance::Random random(3);
  int planned = 0;
  for (int i = 0; i < 20000; ++i) {
    Problem p = problem(1, random.pick(std::vector<std::int64_t>{1, 2, 8, 32}), random.between(1, 512),
                        random.between(0, 200000), random.between(0, 64));
    p.num_q_heads = p.num_kv_heads * random.between(1, 40);
    p.head_dim_v = random.between(1, 512);
    if (random.below(3) == 0) p.q_dtype = DType::f32;
    p.k_format = p.v_format = static_cast<KvFormat>(p.q_dtype);
    Device gpu = metal_device("apple8", static_cast<int>(random.between(0, 80)));
    gpu.max_threadgroup_threads = random.below(2) == 0 ? 0 : random.between(32, 1100);
    gpu.threadgroup_bytes = random.below(2) == 0 ? 0 : random.between(16384, 40000);
    const std::int64_t most_threads = gpu.max_threadgroup_threads == 0 ? 256 : gpu.max_threadgroup_threads;
    const std::int64_t most_bytes =
        gpu.threadgroup_bytes == 0 ? 32768 : std::min<std::int64_t>(32768, gpu.threadgroup_bytes);
    PlanOptions options;
    if (random.below(3) == 0) options.policy.body = random.between(1, 3);
    if (random.below(3) == 0) options.policy.simdgroups = random.between(1, 32);
    try {
      const Plan plan = make_plan(p, gpu, options);
      const Decision& d = decision(plan);
      ++planned;
      ASSERT_LE(d.threads, most_threads);
      ASSERT_EQ(d.threads, 32 * std::max(d.row_tiles, d.token_parts));
      ASSERT_LE(32 * d.merge_simdgroups, most_threads);
      ASSERT_LE(d.threadgroup_bytes, most_bytes);
      ASSERT_LE(d.merge_threadgroup_bytes, most_bytes);
      ASSERT_LT(d.live_floats, 100);
      ASSERT_TRUE(d.row_tiles == 1 || d.token_parts == 1);
      ASSERT_LE(d.token_parts * (d.token_parts > 1 ? p.head_dim_v : 1), kvonce_metal::kJoinFloats);
      if (d.body != Body::per_head) {
        ASSERT_LE(d.row_tiles, kvonce_metal::kMaxRowTiles);
        ASSERT_EQ(d.rows_per_worker, d.row_tile * d.row_tiles);
        const std::int64_t rows = std::max<std::int64_t>(1, p.rows_per_stream());
        ASSERT_EQ(d.row_blocks, (rows + d.rows_per_worker - 1) / d.rows_per_worker);
        ASSERT_EQ(plan.read_factor(), d.row_blocks);
      }
      ASSERT_EQ(plan.workspace_bytes(),
                static_cast<std::size_t>(p.num_q_heads * p.q_len * d.num_chunks * (p.head_dim_v + 2) * 4));
    } catch (const Error& error) {
      ASSERT_TRUE(options.policy.body != 0 || options.policy.simdgroups != 0) << error.what();
    }
  }
  EXPECT_GT(planned, 10000);
}

TEST(MetalPolicyTest, KvIsReadOnceUpTo32RowsAndMore) {
  struct Dims {
    std::int64_t qk, v, most_rows;
  };
  constexpr Dims kDims[] = {{64, 64, 64},   {80, 80, 64},   {96, 96, 64},  {128, 128, 64},
                            {192, 192, 32}, {192, 128, 32}, {256, 256, 32}};
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const Dims& dims : kDims) {
      for (std::int64_t rows = 1; rows <= (dtype == DType::f32 && dims.qk == 256 ? 16 : dims.most_rows); ++rows) {
        Problem p = problem(4 * rows, 4, dims.qk, 8192);
        p.head_dim_v = dims.v;
        p.q_dtype = dtype;
        p.k_format = p.v_format = static_cast<KvFormat>(dtype);
        EXPECT_EQ(make_plan(p, metal_device("apple7")).read_factor(), 1) << dims.qk << "x" << dims.v << ", " << rows;
      }
    }
  }
  EXPECT_EQ(make_plan(problem(32, 8, 128, 8192, 8), metal_device("apple7")).read_factor(), 1);
  // 256 threads hold 16 rows of 256 dims in float32; where more are known to be allowed, 32.
  Problem wide = problem(32, 1, 256, 8192);
  wide.q_dtype = DType::f32;
  wide.k_format = wide.v_format = KvFormat::f32;
  Device gpu = metal_device("apple9");
  EXPECT_EQ(make_plan(wide, gpu).read_factor(), 2);
  gpu.max_threadgroup_threads = 1024;
  EXPECT_EQ(make_plan(wide, gpu).read_factor(), 1);
}

TEST(MetalPolicyTest, TheBaselineRunsOnRequestOnlyAndReadsOncePerRow) {
  for (const Geometry& g : kSeed) {
    const Problem p = problem(g.num_q_heads, g.num_kv_heads, g.head_dim, 8192);
    EXPECT_NE(decision(make_plan(p, metal_device("apple10"))).body, Body::per_head);
    const Plan baseline = make_plan(p, metal_device("apple10"), with("body=3"));
    EXPECT_EQ(decision(baseline).body, Body::per_head);
    EXPECT_EQ(baseline.read_factor(), p.group_size());
    EXPECT_EQ(baseline.policy().row_tile, 1);
  }
}

TEST(MetalPolicyTest, TheKernelDependsNeitherOnTheLengthNorOnNameOrFamily) {
  for (const Geometry& g : kSeed) {
    const std::string expected(
        make_plan(problem(g.num_q_heads, g.num_kv_heads, g.head_dim, 1), metal_device("apple7")).kernel_id());
    for (const std::int64_t max_kv_len : {0, 100, 2048, 131072, 2147483647}) {
      for (const char* family : {"apple7", "apple8", "apple9", "apple10", "apple12"}) {
        Device gpu = metal_device(family, 20);
        gpu.name = "Apple M5 Max";
        const Plan plan = make_plan(problem(g.num_q_heads, g.num_kv_heads, g.head_dim, max_kv_len), gpu);
        EXPECT_EQ(plan.kernel_id(), expected);
      }
    }
  }
}

TEST(MetalPolicyTest, EveryCoreHas24SimdgroupsFromEightThousandTokensOn) {
  for (const Geometry& g : kSeed) {
    for (const int cores : {8, 10, 20, 40}) {
      for (const std::int64_t kv : {8192, 32768}) {
        const Problem p = problem(g.num_q_heads, g.num_kv_heads, g.head_dim, kv);
        const Decision d = decision(make_plan(p, metal_device("apple9", cores)));
        const std::int64_t simdgroups = d.num_chunks * p.num_kv_heads * d.row_blocks * d.threads / 32;
        EXPECT_GE(simdgroups, 24 * cores) << g.num_q_heads << "q/" << g.num_kv_heads << "kv, " << kv << " tokens";
      }
    }
  }
}

TEST(MetalPolicyTest, MoreHeadsPerGroupDoNotMeanFewerThreadgroups) {
  const auto threadgroups = [](std::int64_t group) {
    const Problem p = problem(4 * group, 4, 128, 32768);
    const Decision d = decision(make_plan(p, metal_device("apple10", 20)));
    return d.num_chunks * p.num_kv_heads * d.row_blocks;
  };
  for (const std::int64_t group : {2, 4, 8, 16}) EXPECT_GE(threadgroups(group), threadgroups(1)) << "group " << group;
}

TEST(MetalPolicyTest, PartialsWeighLittleBesideWhatIsStreamed) {
  for (const Geometry& g : kSeed) {
    for (const std::int64_t kv : {2048, 8192, 32768, 131072}) {
      const Plan plan = make_plan(problem(g.num_q_heads, g.num_kv_heads, g.head_dim, kv), metal_device("apple10", 20));
      EXPECT_LE(static_cast<std::int64_t>(plan.workspace_bytes()) * 4, plan.max_kv_bytes());
      if (kv >= 32768) {
        EXPECT_LE(static_cast<std::int64_t>(plan.workspace_bytes()) * 16, plan.max_kv_bytes());
      }
    }
  }
}

TEST(MetalPolicyTest, TheModelReproducesTheTwelvePublishedPoints) {
  constexpr std::int64_t kTokens[] = {2048, 8192, 32768};
  constexpr double kGbps[4][3] = {{239, 282, 281}, {234, 263, 264}, {130, 184, 190}, {76, 113, 119}};
  double squares = 0.0;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 3; ++j) {
      const Geometry& g = kSeed[i];
      const Problem p = problem(g.num_q_heads, g.num_kv_heads, g.head_dim, kTokens[j]);
      const Plan plan = make_plan(p, metal_device("apple10"), with("body=3,splits=1"));
      const double published_us = static_cast<double>(plan.max_kv_bytes()) / kGbps[i][j] * 1e-3;
      const double error = std::log(decision(plan).predicted_us / published_us);
      EXPECT_LT(std::abs(error), 0.17) << i << ", " << kTokens[j] << " tokens";
      squares += error * error;
    }
  }
  EXPECT_LT(std::sqrt(squares / 12.0), 0.075);
}

TEST(MetalPolicyTest, ChunkTokensFixTheSplit) {
  const Plan plan = make_plan(problem(32, 4, 128, 10000), metal_device("apple9"), with("chunk_tokens=300"));
  EXPECT_EQ(decision(plan).fixed_chunk_tokens, 300);
  EXPECT_EQ(plan.max_chunks(), 34);
  PlanOptions options;
  options.chunk_tokens = 300;
  EXPECT_EQ(make_plan(problem(32, 4, 128, 10000), metal_device("apple9"), options).policy(), plan.policy());
  EXPECT_EQ(decision(make_plan(problem(32, 4, 128, 10000), metal_device("apple9"))).fixed_chunk_tokens, 0);
}

TEST(MetalPolicyTest, QuantisedCachesRunOnTheSameBodies) {
  Problem p = problem(32, 4, 128, 32768);
  p.k_format = p.v_format = KvFormat::mlx_int8;
  p.quant_group = 64;
  p.scales_dtype = DType::f16;
  const Plan plan = make_plan(p, metal_device("apple10", 20));
  EXPECT_EQ(plan.kernel_id(), "attend_metal_matrix_mlx_int8_d128x128_r8");
  EXPECT_EQ(plan.read_factor(), 1);
  // Codes, and 2 + 2 bytes of scale and bias for 64 of them.
  EXPECT_EQ(plan.max_kv_bytes(), 4 * 32768 * 256 * 17 / 16);
  EXPECT_GT(decision(plan).slots, decision(make_plan(problem(32, 4, 128, 32768), metal_device("apple10", 20))).slots);
  expect_error([&] { make_plan(p, metal_device("apple10"), with("body=3")); }, ErrorCode::InvalidArgument,
               "the baseline serves no quantised caches");
  Problem other = p;
  other.scales_dtype = DType::f32;
  expect_error([&] { make_plan(other, metal_device("apple10")); }, ErrorCode::Unsupported, "scales_dtype f32");
  other = p;
  other.head_dim_qk = 96;
  other.quant_group = 32;
  expect_error([&] { make_plan(other, metal_device("apple10")); }, ErrorCode::Unsupported,
               "head_dim_qk 96 with a quantised cache");
  other = p;
  other.v_format = KvFormat::mlx_int4;
  expect_error([&] { make_plan(other, metal_device("apple10")); }, ErrorCode::Unsupported, "give q, K and V one type");
}

TEST(MetalPolicyTest, ExplainLabelsThePredictionAndSaysWhyOthersWereRejected) {
  const std::string text = make_plan(problem(32, 4, 128, 32768), metal_device("apple10", 20)).explain();
  for (const char* part :
       {"attend_metal_matrix_f16_d128x128_r8", "metal apple10, 20 cores", "read factor     1", "prediction",
        "never measured", "workspace", "rejected        attend_metal_vector_f16_d128x128_r4",
        "rejected        attend_metal_per_head_f16_d128x128_r1: the baseline"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
  EXPECT_EQ(text.find("time at read"), std::string::npos) << text;
  EXPECT_NE(make_plan(problem(32, 4, 128, 32768), metal_device("apple7")).explain().find("cores unknown"),
            std::string::npos);
}

TEST(MetalPolicyTest, RefusalsNameTheArgument) {
  const auto refuses = [](const std::function<void(Problem&, Device&, PlanOptions&)>& spoil, ErrorCode code,
                          const std::string& words) {
    Problem p = problem(32, 4, 128, 8192);
    Device gpu = metal_device("apple9");
    PlanOptions options;
    spoil(p, gpu, options);
    expect_error([&] { make_plan(p, gpu, options); }, code, words);
  };
  using P = Problem;
  using D = Device;
  using O = PlanOptions;
  constexpr ErrorCode kInvalid = ErrorCode::InvalidArgument;
  constexpr ErrorCode kUnsupported = ErrorCode::Unsupported;
  refuses(
      [](P& p, D&, O&) {
        p.head_dim_qk = 576;
        p.head_dim_v = 512;
      },
      kUnsupported, "head_dim_qk 576");
  refuses([](P& p, D&, O&) { p.k_format = KvFormat::bf16; }, kUnsupported, "give q, K and V one type");
  refuses([](P& p, D&, O&) { p.k_format = p.v_format = KvFormat::q8_0; }, kUnsupported, "k_format q8_0");
  refuses([](P& p, D&, O&) { p.mask = MaskKind::tree; }, kUnsupported, "mask tree");
  refuses([](P& p, D&, O&) { p.has_segments = true; }, kUnsupported, "has_segments");
  refuses(
      [](P& p, D&, O&) {
        p.layout = KvLayout::paged_nhd;
        p.page_size = 16;
      },
      kUnsupported, "layout paged_nhd");
  refuses([](P&, D& d, O&) { d.target = "apple6"; }, ErrorCode::Unavailable, "device.target: got 'apple6'");
  refuses([](P&, D& d, O&) { d.max_threadgroup_threads = 16; }, kInvalid, "device.max_threadgroup_threads: got 16");
  refuses([](P&, D& d, O&) { d.threadgroup_bytes = 100; }, kInvalid, "device.threadgroup_bytes: got 100");
  refuses([](P&, D& d, O&) { d.num_sms = -1; }, kInvalid, "device.num_sms: got -1");
  for (const auto& [policy, words] : std::vector<std::pair<std::string, std::string>>{
           {"body=4", "policy.body: got 4"},
           {"row_tile=3", "policy.row_tile: got 3"},
           {"row_tile=16", "d128x128_r16: 140 floats a lane, at most 96 stay in registers"},
           {"body=2,row_tile=4", "policy.row_tile: got 4, allowed: 0 (choose) or 8 for the matrix body"},
           {"simdgroups=9",
            "policy.simdgroups: got 9, allowed: 0 (choose) to 8: a threadgroup has at most 256 threads"},
           {"body=3,chunk_tokens=64", "policy.chunk_tokens: got 64, allowed: 0 for the per_head body"},
           {"simdgroups=3", "policy.simdgroups: got 3"},
           {"step_tokens=5", "policy.step_tokens: got 5"},
           {"prefetch_lines=1", "policy.prefetch_lines: got 1, allowed: 0 on the metal backend"},
           {"cluster=1", "policy.cluster: got 1"}}) {
    refuses([&text = policy](P&, D&, O& o) { o.policy = parse_policy(text); }, kInvalid, words);
  }
  expect_error([] { metal_device("M5 Max"); }, kInvalid, "target: got 'M5 Max', allowed: apple7 (M1)");
  expect_error([] { metal_device("apple9", -3); }, kInvalid, "num_cores: got -3");
}

TEST(MetalBackendTest, NothingRunsHereAndDevicesSayWhy) {
  const Plan plan = make_plan(problem(8, 2, 64, 100), metal_device("apple9"));
  std::vector<float> numbers(8 * 64 + 100 * 2 * 64, 0.0F);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  Inputs inputs;
  inputs.q = {numbers.data(), 8 * 64, 64, 64};
  inputs.k = inputs.v = {numbers.data(), 2 * 100 * 64, 100 * 64, 64};
  inputs.kv_len = 100;
  Outputs outputs;
  outputs.out = numbers.data();
  outputs.out_seq_stride = 8 * 64;
  outputs.out_head_stride = outputs.out_token_stride = 64;
  expect_error([&] { attend(plan, inputs, outputs, workspace.data(), workspace.size()); }, ErrorCode::Unavailable,
               "MLX launches the kernels");
  const std::vector<Device> all = devices();
  const auto metal = std::find_if(all.begin(), all.end(), [](const Device& d) { return d.backend == Backend::metal; });
  ASSERT_NE(metal, all.end());
  EXPECT_NE(metal->unavailable.find("no Metal runtime"), std::string::npos);
  expect_error([&] { make_plan(problem(8, 2, 64, 100), *metal); }, ErrorCode::Unavailable, "no Metal runtime");
}

}  // namespace
}  // namespace kvonce::metal
