// Planning for CUDA needs integers only: these tests describe a device by hand and run everywhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "core/plan_data.hpp"
#include "cuda/cuda_plan.hpp"
#include "generator.hpp"
#include "kvonce/kvonce.hpp"
#include "run_case.hpp"
#include "shared/token_range.h"

namespace kvonce::cuda {
namespace {

Device hopper(const std::string& target = "sm_90") {
  Device device;
  device.backend = Backend::cuda;
  device.target = target;
  device.num_sms = 132;
  device.name = "described by hand";
  return device;
}

Problem bf16_problem(std::int64_t group = 8, std::int64_t kv_heads = 4, std::int64_t dim = 128,
                     std::int64_t max_kv_len = 32768) {
  Problem p;
  p.num_kv_heads = kv_heads;
  p.num_q_heads = group * kv_heads;
  p.head_dim_qk = dim;
  p.max_kv_len = max_kv_len;
  p.q_dtype = DType::bf16;
  p.out_dtype = DType::bf16;
  p.k_format = KvFormat::bf16;
  p.v_format = KvFormat::bf16;
  return p;
}

PlanOptions with(const std::string& policy) {
  PlanOptions options;
  options.policy = parse_policy(policy);
  return options;
}

const CudaPlan& cuda_plan(const Plan& plan) { return static_cast<const CudaPlan&>(*plan.data().backend_plan); }

// The message of a refusal with that code; anything else is a failure.
std::string refusal(const Problem& problem, ErrorCode code, const PlanOptions& options = {}) {
  try {
    (void)make_plan(problem, hopper(), options);
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "planned";
  return {};
}

TEST(CudaPlanTest, WhatIsNotServedIsRefusedWithAnAlternative) {
  struct Case {
    const char* names;
    std::function<void(Problem&)> change;
  };
  const std::vector<Case> cases = {
      {"k_format q8_0", [](Problem& p) { p.k_format = KvFormat::q8_0; }},
      {"v_format f8_e4m3", [](Problem& p) { p.v_format = KvFormat::f8_e4m3; }},
      {"v_format mlx_int4", [](Problem& p) { p.v_format = KvFormat::mlx_int4, p.quant_group = 64; }},
      {"layout paged_nhd", [](Problem& p) { p.layout = KvLayout::paged_nhd, p.page_size = 16; }},
      {"layout paged_hnd", [](Problem& p) { p.layout = KvLayout::paged_hnd, p.page_size = 16; }},
      {"mask boolean", [](Problem& p) { p.mask = MaskKind::boolean; }},
      {"mask additive", [](Problem& p) { p.mask = MaskKind::additive; }},
      {"mask tree", [](Problem& p) { p.mask = MaskKind::tree; }},
      {"softcap", [](Problem& p) { p.softcap = 30.0F; }},
      {"has_alibi", [](Problem& p) { p.has_alibi = true; }},
      {"has_segments", [](Problem& p) { p.has_segments = true; }},
      {"head_dim_qk 100", [](Problem& p) { p.head_dim_qk = 100; }},
      {"head_dim_v 60", [](Problem& p) { p.head_dim_v = 60; }},
      {"max_kv_len 2147483647", [](Problem& p) { p.max_kv_len = 2147483647; }},
  };
  for (const Case& c : cases) {
    Problem p = bf16_problem();
    c.change(p);
    const std::string message = refusal(p, ErrorCode::Unsupported);
    EXPECT_EQ(message.rfind(c.names, 0), 0U) << message;
    EXPECT_NE(message.find("cuda backend"), std::string::npos) << message;
    const std::size_t alternative = message.find("; ");
    ASSERT_NE(alternative, std::string::npos) << message;
    EXPECT_GT(message.size(), alternative + 10) << message;
  }
}

TEST(CudaPlanTest, KernelIdNamesTheKernelForFormatsDimsAndRows) {
  const auto id = [](const Problem& p) { return std::string(make_plan(p, hopper()).kernel_id()); };
  EXPECT_EQ(id(bf16_problem()), "attend_sm_90_bf16_d128x128_r8_plain");
  EXPECT_EQ(id(bf16_problem(1)), "attend_sm_90_bf16_d128x128_r8_plain");
  EXPECT_EQ(id(bf16_problem(9)), "attend_sm_90_bf16_d128x128_r16");
  EXPECT_EQ(id(bf16_problem(32)), "attend_sm_90_bf16_d128x128_r32");
  EXPECT_EQ(id(bf16_problem(64)), "attend_sm_90_bf16_d128x128_r64");
  EXPECT_EQ(id(bf16_problem(64, 4, 96)), "attend_sm_90_bf16_d96x96_r32");
  EXPECT_EQ(id(bf16_problem(16, 4, 256)), "attend_sm_90_bf16_d256x256_r8");
  Problem p = bf16_problem(4, 2, 64);
  p.q_dtype = DType::f16;
  p.k_format = p.v_format = KvFormat::f16;
  EXPECT_EQ(id(p), "attend_sm_90_f16_d64x64_r8");
  p.v_format = KvFormat::bf16;
  EXPECT_EQ(id(p), "attend_sm_90_kf16_vbf16_dany_r8");
  p.v_format = KvFormat::f16;
  p.q_dtype = DType::f32;
  EXPECT_EQ(id(p), "attend_sm_90_f16_dany_r8");
  p.q_dtype = DType::f16;
  for (const auto& [dim, rows] : std::vector<std::pair<std::int64_t, int>>{{72, 8}, {136, 4}, {520, 1}, {1024, 1}}) {
    p.head_dim_qk = dim;
    EXPECT_EQ(id(p), "attend_sm_90_f16_dany_r" + std::to_string(rows));
  }
  EXPECT_EQ(std::string(make_plan(bf16_problem(), hopper("sm_120")).kernel_id()),
            "attend_sm_120_bf16_d128x128_r8_plain");
}

// K and V of more than 256 dims come through shared memory, by copies that exist from sm_90 on.
TEST(CudaPlanTest, DimsAbove256NeedBulkCopiesAndSharedMemory) {
  Problem p = bf16_problem(16, 1, 576);
  p.head_dim_v = 512;
  const auto id = [&p](const Device& device) { return std::string(make_plan(p, device).kernel_id()); };
  EXPECT_EQ(id(hopper()), "attend_sm_90_bf16_d576x512_r8");
  EXPECT_GT(cuda_plan(make_plan(p, hopper())).instance.kv_bytes, 4 * 16 * (576 + 512) * 2);
  EXPECT_EQ(id(hopper("sm_80")), "attend_sm_80_bf16_dany_r1");
  Device small = hopper("sm_120");
  small.l1_bytes = 100 * 1024;
  EXPECT_EQ(id(small), "attend_sm_120_bf16_dany_r1");
  EXPECT_NE(make_plan(p, small).explain().find("not on this device"), std::string::npos)
      << make_plan(p, small).explain();
}

TEST(CudaPlanTest, EveryListedTensorCoreKernelIsChosen) {
  struct Dims {
    std::int64_t qk, v;
  };
  constexpr Dims kDims[] = {
#define KVONCE_CUDA_DIMS(qk, v) {qk, v},
#include "cuda/instances.def"
  };
  for (const Dims dims : kDims) {
    Problem p = bf16_problem(8, 4, dims.qk);
    p.head_dim_v = dims.v;
    const Plan plan = make_plan(p, hopper());
    EXPECT_NE(plan.kernel_id().find("_d" + std::to_string(dims.qk) + "x" + std::to_string(dims.v) + "_"),
              std::string::npos)
        << plan.kernel_id();
    EXPECT_TRUE(cuda_plan(plan).mma.exists);
    EXPECT_TRUE(cuda_plan(plan).generic.exists) << "unaligned tensors need it";
  }
}

TEST(CudaPlanTest, ReadFactorIsTheNumberOfRowBlocks) {
  EXPECT_EQ(make_plan(bf16_problem(8), hopper()).read_factor(), 1);
  EXPECT_EQ(make_plan(bf16_problem(16), hopper()).read_factor(), 1);
  EXPECT_EQ(make_plan(bf16_problem(32), hopper()).read_factor(), 1);
  EXPECT_EQ(make_plan(bf16_problem(64), hopper()).read_factor(), 1);
  EXPECT_EQ(make_plan(bf16_problem(65), hopper()).read_factor(), 2);
  EXPECT_EQ(make_plan(bf16_problem(33), hopper("sm_80")).read_factor(), 2);
  EXPECT_EQ(make_plan(bf16_problem(33), hopper("sm_120")).read_factor(), 2);
  EXPECT_EQ(make_plan(bf16_problem(33, 4, 96), hopper()).read_factor(), 2);
  EXPECT_EQ(make_plan(bf16_problem(32, 4, 112), hopper()).read_factor(), 2);
  EXPECT_EQ(make_plan(bf16_problem(17), hopper(), with("row_tile=8")).read_factor(), 3);
  EXPECT_EQ(make_plan(bf16_problem(16, 4, 256), hopper()).read_factor(), 2);
}

// One query token, up to 8 query heads per KV head, nothing masked, results of the inputs' type.
TEST(CudaPlanTest, RowTilesFitTheSharedMemory) {
  Device device = hopper("sm_120");
  device.l1_bytes = 100 * 1024;
  EXPECT_EQ(make_plan(bf16_problem(32), device).read_factor(), 2);
  EXPECT_EQ(make_plan(bf16_problem(16), device).read_factor(), 1);
  EXPECT_EQ(make_plan(bf16_problem(32, 4, 64), device).read_factor(), 1);
}

// Where two to four splits leave several slices of the output to a joining block.
TEST(CudaPlanTest, FewSplitsJoinInAWayOfTheirOwn) {
  Problem p = bf16_problem(4, 8, 128, 4096);
  p.num_seqs = 8;
  EXPECT_EQ(cuda_plan(make_plan(p, hopper())).mma.join, kJoinFew);
  EXPECT_EQ(cuda_plan(make_plan(p, hopper())).generic.join, kJoinWorkspace);
  EXPECT_EQ(cuda_plan(make_plan(p, hopper(), with("splits=1"))).mma.join, kJoinWorkspace);
  EXPECT_EQ(cuda_plan(make_plan(p, hopper(), with("splits=5"))).mma.join, kJoinWorkspace);
  EXPECT_EQ(cuda_plan(make_plan(bf16_problem(1, 32), hopper())).mma.join, kJoinWorkspace) << "one slice each";
  const Plan chunks = make_plan(p, hopper(), with("chunk_tokens=2048"));
  EXPECT_EQ(cuda_plan(chunks).mma.num_splits, 2);
  EXPECT_EQ(cuda_plan(chunks).mma.join, kJoinWorkspace) << "a row's bits would depend on the capacity";
}

TEST(CudaPlanTest, PlainDecodeHasInstancesOfItsOwn) {
  const auto is_plain = [](const Problem& p, const char* policy = "") {
    const Plan plan = make_plan(p, hopper(), with(policy));
    const bool named = plan.kernel_id().find("_plain") != std::string::npos;
    EXPECT_EQ(named, cuda_plan(plan).plain.has_value()) << plan.kernel_id();
    return named;
  };
  for (const std::int64_t group : {1, 4, 7, 8}) {
    for (const std::int64_t kv_len : {0, 1, 2048, 131072}) EXPECT_TRUE(is_plain(bf16_problem(group, 4, 128, kv_len)));
  }
  EXPECT_TRUE(is_plain(bf16_problem(8, 4, 64)));
  EXPECT_FALSE(is_plain(bf16_problem(9)));
  EXPECT_FALSE(is_plain(bf16_problem(8, 4, 96)));
  EXPECT_FALSE(is_plain(bf16_problem(), "chunk_tokens=64"));
  Problem p = bf16_problem(4);
  p.q_len = 2;
  EXPECT_FALSE(is_plain(p));
  p = bf16_problem();
  p.window = 100;
  EXPECT_FALSE(is_plain(p));
  p = bf16_problem();
  p.has_sinks = true;
  EXPECT_FALSE(is_plain(p));
  p = bf16_problem();
  p.out_dtype = DType::f32;
  EXPECT_FALSE(is_plain(p));
}

// A body without a loop, where no warp has a second step.
TEST(CudaPlanTest, ShortSplitsTakeOneStep) {
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int64_t kv_len : {1, 100, 1000, 2048, 3000, 8192, 20000}) {
      for (const char* policy : {"", "cluster=0", "cluster=0,splits=7", "cluster=1,splits=16"}) {
        const Plan plan = make_plan(bf16_problem(8, 4, dim, kv_len), hopper(), with(policy));
        const KernelShape& s = cuda_plan(plan).mma;
        const MmaInstance& plain = cuda_plan(plan).plain.value();
        const std::int64_t most = s.share_tiles + (s.share_rest > 0 ? 1 : 0);
        EXPECT_EQ(plain.one_step, most <= (dim == 64 ? 32 : 16)) << dim << " " << kv_len << " " << policy;
        if (plain.one_step) {
          EXPECT_GE(plain.warps * plain.step_tiles, most);
        }
      }
    }
  }
}

// A slice of kSlice elements of four dims: how many rows it can touch.
TEST(CudaPlanTest, SlicesTouchTheRowsTheyCan) {
  for (std::int64_t dim_v = 8; dim_v <= 1024; dim_v += 8) {
    Problem p = bf16_problem(7, 4, 64);
    p.head_dim_v = dim_v;
    const Plan plan = make_plan(p, hopper());
    for (const KernelShape* s : {&cuda_plan(plan).mma, &cuda_plan(plan).generic}) {
      if (!s->exists) continue;
      const auto elements = static_cast<std::int32_t>(s->rows_per_block * dim_v / 4);
      const auto row = static_cast<std::int32_t>(dim_v / 4);
      for (std::int32_t slice = 0; slice < slices_of(elements); ++slice) {
        const std::int32_t first = slice * kSlice / row;
        const std::int32_t last = (std::min(elements, (slice + 1) * kSlice) - 1) / row;
        EXPECT_LE(last - first + 1, s->slice_rows) << dim_v;
      }
    }
  }
}

TEST(CudaPlanTest, PolicyFieldsThatCannotBeAreRefusedByName) {
  for (const char* policy :
       {"row_tile=1", "row_tile=4", "row_tile=24", "row_tile=128", "rows_per_worker=8", "chunk_tokens=1",
        "chunk_tokens=100", "chunk_tokens=2147483632", "step_tokens=8", "prefetch_tokens=0", "prefetch_lines=1",
        "pair_dot=0", "worker_bytes=1000", "splits=65536", "join_blocks=1025"}) {
    const std::string message = refusal(bf16_problem(), ErrorCode::InvalidArgument, with(policy));
    const std::string field = std::string(policy).substr(0, std::string(policy).find('='));
    EXPECT_EQ(message.rfind("policy." + field + ":", 0), 0U) << message;
  }
  for (const std::int64_t cluster : {-2, 2}) {
    PlanOptions options;
    options.policy.cluster = cluster;
    EXPECT_EQ(refusal(bf16_problem(), ErrorCode::InvalidArgument, options).rfind("policy.cluster:", 0), 0U);
  }
  EXPECT_NE(refusal(bf16_problem(64, 4, 96), ErrorCode::InvalidArgument, with("row_tile=64")).find("8, 16 or 32"),
            std::string::npos);
  EXPECT_NE(refusal(bf16_problem(16, 4, 256), ErrorCode::InvalidArgument, with("row_tile=16")).find('8'),
            std::string::npos);
}

TEST(CudaPlanTest, SplitsClusterAndJoinBlocksAreWhatWasAskedFor) {
  for (const std::int64_t splits : {1, 2, 3, 13, 132, 1000}) {
    const Plan plan = make_plan(bf16_problem(), hopper(), with("cluster=0,splits=" + std::to_string(splits)));
    EXPECT_EQ(plan.policy().splits, splits);
    EXPECT_EQ(plan.policy().cluster, 0);
    EXPECT_EQ(plan.max_chunks(), splits);
  }
  for (const std::int64_t splits : {2, 5, 16}) {
    const Plan plan = make_plan(bf16_problem(), hopper(), with("cluster=1,splits=" + std::to_string(splits)));
    EXPECT_EQ(plan.policy().splits, splits);
    EXPECT_EQ(plan.policy().cluster, 1);
  }
  EXPECT_EQ(make_plan(bf16_problem(), hopper(), with("cluster=0,splits=32,join_blocks=5")).policy().join_blocks, 5);
  // No more blocks can join than there are.
  EXPECT_EQ(make_plan(bf16_problem(), hopper(), with("cluster=0,splits=3,join_blocks=5")).policy().join_blocks, 3);
}

TEST(CudaPlanTest, ChunkTokensFixTheSplit) {
  for (const std::int64_t chunk : {16, 64, 1024}) {
    PlanOptions options;
    options.chunk_tokens = chunk;
    for (const std::int64_t max_kv_len : {0, 1, 16, 17, 5000}) {
      const Plan plan = make_plan(bf16_problem(8, 4, 128, max_kv_len), hopper(), options);
      EXPECT_EQ(plan.policy().chunk_tokens, chunk);
      EXPECT_EQ(plan.policy().cluster, 0);
      EXPECT_EQ(plan.max_chunks(), std::max<std::int64_t>(1, shared::ceil_div(max_kv_len, chunk)));
      EXPECT_EQ(cuda_plan(plan).mma.split_tokens, chunk);
      EXPECT_EQ(cuda_plan(plan).generic.split_tokens, chunk);
    }
  }
}

TEST(CudaPlanTest, SmallCachesJoinInAClusterWhereTheDeviceHasThem) {
  const Problem small = bf16_problem(8, 4, 128, 2048);
  EXPECT_EQ(make_plan(small, hopper("sm_90")).policy().cluster, 1);
  EXPECT_EQ(make_plan(small, hopper("sm_100")).policy().cluster, 1);
  EXPECT_EQ(make_plan(small, hopper("sm_80")).policy().cluster, 0);
  EXPECT_EQ(make_plan(small, hopper("sm_89"), with("cluster=1")).policy().cluster, 0);
  EXPECT_EQ(make_plan(bf16_problem(8, 4, 128, 131072), hopper()).policy().cluster, 0);
  EXPECT_EQ(make_plan(small, hopper(), with("cluster=0")).policy().cluster, 0);
}

// The blocks of a call run at once where there are fewer streams than multiprocessors, and use most of them.
TEST(CudaPlanTest, ChosenSplitsFillTheDeviceAndNoMore) {
  conformance::Random random(1);
  for (int i = 0; i < 3000; ++i) {
    Problem p = bf16_problem(
        random.between(1, 40), random.between(1, 40), random.pick(std::vector<std::int64_t>{64, 72, 128, 256, 512}),
        random.pick(std::vector<std::int64_t>{0, 1, 40, 1000, 2048, 8192, 32768, 131072, 1 << 24}));
    p.num_seqs = random.between(1, 20);
    p.q_len = random.between(1, 8);
    Device device = hopper();
    device.num_sms = static_cast<int>(random.pick(std::vector<std::int64_t>{1, 16, 108, 132, 148}));
    const Plan plan = make_plan(p, device);
    for (const KernelShape* shape : {&cuda_plan(plan).mma, &cuda_plan(plan).generic}) {
      if (!shape->exists) continue;
      const std::int64_t streams = p.num_seqs * p.num_kv_heads * shape->row_blocks;
      const std::int64_t tiles = shared::ceil_div(p.max_kv_len, 16);
      const std::string what = plan.explain();
      ASSERT_GE(shape->num_splits, 1) << what;
      ASSERT_LE(shape->num_splits, std::max<std::int64_t>(1, tiles)) << what;
      ASSERT_GE(shape->join_blocks, 1) << what;
      ASSERT_LE(shape->join_blocks, shape->num_splits) << what;
      ASSERT_GE(static_cast<std::int64_t>(shape->rows_per_block) * shape->row_blocks, p.rows_per_stream()) << what;
      if (streams <= device.num_sms) {
        ASSERT_LE(streams * shape->num_splits, device.num_sms) << what;
        if (tiles >= 4 * device.num_sms && shape->join == kJoinWorkspace) {
          ASSERT_GT(2 * streams * shape->num_splits, device.num_sms) << what;
        }
      }
      if (shape->join == kJoinCluster) {
        ASSERT_LE(shape->num_splits, 16) << what;
      }
    }
  }
}

TEST(CudaPlanTest, WorkspacePartsAreAlignedAndDoNotOverlap) {
  conformance::Random random(2);
  for (int i = 0; i < 3000; ++i) {
    Problem p = bf16_problem(random.between(1, 40), random.between(1, 9), 8 * random.between(1, 128),
                             random.between(0, 100000));
    p.num_seqs = random.between(1, 9);
    p.q_len = random.between(1, 64);
    PlanOptions options;
    options.policy.cluster = random.between(-1, 1);
    if (random.below(2) == 0) options.policy.splits = random.between(0, 300);
    if (random.below(3) == 0) options.chunk_tokens = 16 * random.between(1, 100);
    if (random.below(2) == 0) options.policy.join_blocks = random.between(0, 40);
    const Plan plan = make_plan(p, hopper(), options);
    const CudaPlan& parts = cuda_plan(plan);
    std::size_t tickets = 0;
    std::size_t ml = 0;
    std::size_t o = 0;
    for (const KernelShape* s : {&parts.mma, &parts.generic}) {
      if (!s->exists || s->join == kJoinCluster || s->num_splits == 1) continue;
      const auto streams = static_cast<std::size_t>(p.num_seqs * p.num_kv_heads * s->row_blocks);
      const auto splits = static_cast<std::size_t>(s->num_splits);
      const auto rows = static_cast<std::size_t>(s->place_rows);
      const auto slices = static_cast<std::size_t>(slices_of(static_cast<int>(s->place_rows * p.dim_v() / 4)));
      tickets = std::max(tickets, 8 * streams);
      ml = std::max(ml, 8 * streams * slices * splits * static_cast<std::size_t>(s->slice_rows));
      o = std::max(o, 4 * streams * splits * rows * static_cast<std::size_t>(p.dim_v()));
    }
    ASSERT_GE(parts.tickets, 8U) << "the header stands before";
    ASSERT_GE(parts.partial_ml, parts.tickets + tickets);
    ASSERT_GE(parts.partial_o, parts.partial_ml + ml);
    ASSERT_GE(parts.end, parts.partial_o + o);
    for (const std::size_t offset : {parts.tickets, parts.partial_ml, parts.partial_o}) ASSERT_EQ(offset % 256, 0U);
    ASSERT_GE(plan.workspace_bytes(), parts.end + 255) << "the base may stand anywhere";
  }
}

TEST(CudaPlanTest, TheWorkspaceDoesNotGrowWithTheCapacity) {
  const std::size_t at_131072 = make_plan(bf16_problem(8, 8, 128, 131072), hopper()).workspace_bytes();
  EXPECT_EQ(make_plan(bf16_problem(8, 8, 128, 1 << 24), hopper()).workspace_bytes(), at_131072);
  EXPECT_LT(at_131072, std::size_t{4} << 20);
  // A cluster joins without memory.
  EXPECT_LT(make_plan(bf16_problem(8, 4, 128, 2048), hopper(), with("cluster=1")).workspace_bytes(), 1U << 20);
}

TEST(CudaPlanTest, AWorkspaceBeyondTheAddressSpaceIsRefused) {
  Problem p = bf16_problem(8, 8000, 1024, 2000000000);
  p.num_seqs = 1 << 20;
  p.num_kv_heads = p.num_q_heads = 1 << 15;
  EXPECT_NE(refusal(p, ErrorCode::InvalidArgument, with("chunk_tokens=16")).find("chunk_tokens"), std::string::npos);
  EXPECT_NE(refusal(p, ErrorCode::InvalidArgument, with("chunk_tokens=1600")).find("workspace"), std::string::npos);
}

TEST(CudaPlanTest, NothingToDoNeedsNoWorkspace) {
  Problem p = bf16_problem();
  p.num_seqs = 0;
  EXPECT_EQ(make_plan(p, hopper()).workspace_bytes(), 0U);
  p.num_seqs = 1;
  p.q_len = 0;
  EXPECT_EQ(make_plan(p, hopper()).workspace_bytes(), 0U);
  EXPECT_GE(make_plan(bf16_problem(8, 4, 128, 0), hopper()).max_chunks(), 1);
}

TEST(CudaPlanTest, MoreStreamsThanAGridHasRowsAreRefused) {
  Problem p = bf16_problem(1, 70000, 64, 100);
  EXPECT_NE(refusal(p, ErrorCode::Unsupported).find("num_kv_heads times row blocks"), std::string::npos);
}

TEST(CudaPlanTest, ExplainSaysWhatRunsAndWhyNotOnTensorCores) {
  const std::string text = make_plan(bf16_problem(), hopper()).explain();
  for (const char* part :
       {"cuda sm_90", "attend_sm_90_bf16_d128x128_r8", "splits=", "read factor     1", "workspace"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  Problem p = bf16_problem();
  p.q_dtype = DType::f32;
  const std::string generic = make_plan(p, hopper()).explain();
  EXPECT_NE(generic.find("rejected"), std::string::npos) << generic;
  EXPECT_NE(generic.find("16-bit"), std::string::npos) << generic;
}

TEST(CudaPlanTest, AnUnavailableDeviceSaysWhy) {
  for (const Device& device : devices()) {
    if (device.backend != Backend::cuda || device.unavailable.empty()) continue;
    try {
      (void)make_plan(bf16_problem(), device);
      ADD_FAILURE() << "planned";
    } catch (const Error& error) {
      EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(ErrorCode::Unavailable));
      EXPECT_NE(std::string(error.what()).find("use backend cpu"), std::string::npos) << error.what();
    }
  }
}

// What the conformance suite may leave out is exactly what the plan refuses.
TEST(CudaPlanTest, RandomProblemsAreServedOrNotClaimed) {
  conformance::Random random(3);
  int num_planned = 0;
  for (int i = 0; i < 20000; ++i) {
    Problem p =
        bf16_problem(random.between(1, 20), random.between(1, 9), random.between(1, 1024), random.between(0, 10000));
    if (random.below(4) != 0) p.head_dim_qk = (p.head_dim_qk + 7) / 8 * 8;
    p.head_dim_v =
        random.below(2) == 0 ? 0 : (random.below(4) == 0 ? random.between(1, 1024) : 8 * random.between(1, 128));
    p.q_dtype = static_cast<DType>(random.below(3));
    p.k_format = static_cast<KvFormat>(random.below(random.below(4) == 0 ? 4 : 3));
    p.v_format = static_cast<KvFormat>(random.below(random.below(4) == 0 ? 4 : 3));
    p.num_seqs = random.between(0, 5);
    p.q_len = random.between(0, 64);
    p.causal = random.below(2) == 0;
    p.window = random.below(3) == 0 ? random.between(0, 300) : 0;
    p.has_sinks = random.below(3) == 0;
    p.has_alibi = random.below(20) == 0;
    p.softcap = random.below(20) == 0 ? 10.0F : 0.0F;
    p.mask = random.below(20) == 0 ? MaskKind::boolean : MaskKind::none;
    const bool served = conformance::cuda_serves(p);
    try {
      (void)make_plan(p, hopper());
      ++num_planned;
      ASSERT_TRUE(served) << "d" << p.head_dim_qk << "x" << p.dim_v();
    } catch (const Error& error) {
      ASSERT_EQ(static_cast<int>(error.code()), static_cast<int>(ErrorCode::Unsupported)) << error.what();
      ASSERT_FALSE(served) << error.what();
    }
  }
  EXPECT_GT(num_planned, 5000);
}

}  // namespace
}  // namespace kvonce::cuda
