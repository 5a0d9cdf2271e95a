// Every length, group, q_len and instance near the tiles' edges, with every kind of join, against the oracle.
#include "device_test.hpp"

namespace kvonce::cuda_test {
namespace {

class ShapesTest : public DeviceTest {};

TEST_F(ShapesTest, EveryLengthUpTo130) {
  for (const JoinKind& join : join_kinds()) {
    for (const std::int64_t dim : {128, 64}) {
      for (std::int32_t kv_len = 1; kv_len <= 130; ++kv_len) {
        CaseSpec spec = make_case(KvFormat::bf16, dim, 8, 2, kv_len);
        spec.problem.max_kv_len = 130;
        join.apply(spec);
        expect_oracle(spec);
      }
    }
  }
}

TEST_F(ShapesTest, LengthsAroundEverySplit) {
  for (const JoinKind& join : join_kinds()) {
    for (const std::int32_t kv_len :
         {255, 256, 257, 511, 513, 831, 832, 833, 1023, 1024, 1025, 2111, 2113, 4095, 4097}) {
      for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
        CaseSpec spec = make_case(format, format == KvFormat::f16 ? 64 : 128, 4, 2, kv_len);
        spec.problem.max_kv_len = 4100;
        join.apply(spec);
        expect_oracle(spec);
      }
    }
  }
}

TEST_F(ShapesTest, BatchWithEmptySequences) {
  for (const JoinKind& join : join_kinds()) {
    for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
      for (const std::int64_t q_len : {1, 3}) {
        CaseSpec spec = make_case(format, 128, 5, 2, 2000, q_len);
        spec.problem.num_seqs = 6;
        spec.kv_lens = {0, 1, 130, 0, 2000, 77};
        join.apply(spec);
        expect_oracle(spec);
      }
    }
  }
}

TEST_F(ShapesTest, EveryGroup) {
  for (const JoinKind& join : {join_kinds()[0], join_kinds()[4]}) {
    for (std::int64_t group = 1; group <= 16; ++group) {
      for (std::int64_t kv_heads = 1; kv_heads <= 3; ++kv_heads) {
        for (const KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32}) {
          CaseSpec spec = make_case(format, format == KvFormat::bf16 ? 128 : 64, group, kv_heads, 500);
          join.apply(spec);
          expect_oracle(spec);
        }
      }
    }
  }
}

TEST_F(ShapesTest, EveryQLen) {
  for (const JoinKind& join : {join_kinds()[0], join_kinds()[4], join_kinds()[5]}) {
    for (std::int64_t q_len = 1; q_len <= 8; ++q_len) {
      for (const std::int64_t group : {1, 5, 8}) {
        for (const std::int64_t kv_len : {3, 40, 257}) {
          for (const bool causal : {true, false}) {
            CaseSpec spec = make_case(KvFormat::bf16, 128, group, 2, kv_len, q_len);
            spec.problem.causal = causal;
            join.apply(spec);
            spec.name += causal ? " causal" : "";
            expect_oracle(spec);
          }
        }
      }
    }
  }
}

TEST_F(ShapesTest, ManyQueryTokens) {
  for (const std::int64_t q_len : {16, 17, 33, 64}) {
    for (const std::int64_t group : {1, 3, 8}) {
      expect_oracle(make_case(KvFormat::bf16, 128, group, 2, 300, q_len));
      expect_oracle(make_case(KvFormat::f32, 64, group, 2, 300, q_len));
    }
  }
}

// Every compiled tensor-core kernel, with one and two row tiles, full and not.
TEST_F(ShapesTest, EveryTensorCoreInstance) {
  struct Dims {
    std::int64_t qk, v;
  };
  constexpr Dims kDims[] = {
#define KVONCE_CUDA_DIMS(qk, v) {qk, v},
#include "cuda/instances.def"
  };
  for (const Dims dims : kDims) {
    for (const KvFormat format : {KvFormat::bf16, KvFormat::f16}) {
      for (const std::int64_t rows : {1, 7, 8, 9, 15, 16, 17, 33}) {
        for (const std::int64_t row_tile : {8, 16, 32, 64}) {
          if (row_tile > 8 && std::max(dims.qk, dims.v) > 128) continue;
          if (row_tile == 32 && dims.qk % 32 != 0) continue;
          if (row_tile == 64 && (rows < 17 || device().target != "sm_90" || (dims.qk != 64 && dims.qk != 128)))
            continue;
          for (const JoinKind& join : join_kinds()) {
            CaseSpec spec = make_case(format, dims.qk, rows, 2, 150);
            spec.problem.head_dim_v = dims.v;
            join.apply(spec);
            spec.options.policy.row_tile = row_tile;
            expect_oracle(spec);
          }
        }
      }
    }
  }
}

TEST_F(ShapesTest, GenericDimsAndMixedFormats) {
  struct Case {
    std::int64_t qk, v;
    KvFormat k, v_format;
    DType q;
  };
  const std::vector<Case> cases = {
      {8, 8, KvFormat::f32, KvFormat::f32, DType::f32},        {40, 40, KvFormat::bf16, KvFormat::bf16, DType::bf16},
      {120, 128, KvFormat::f32, KvFormat::f32, DType::f32},    {128, 128, KvFormat::bf16, KvFormat::f16, DType::f32},
      {128, 128, KvFormat::bf16, KvFormat::bf16, DType::f32},  {136, 136, KvFormat::f32, KvFormat::f32, DType::f32},
      {256, 256, KvFormat::f32, KvFormat::f16, DType::bf16},   {264, 8, KvFormat::f16, KvFormat::f16, DType::f16},
      {512, 512, KvFormat::bf16, KvFormat::bf16, DType::bf16}, {576, 512, KvFormat::bf16, KvFormat::bf16, DType::bf16},
      {8, 1024, KvFormat::f32, KvFormat::f32, DType::f32},     {1024, 1024, KvFormat::f16, KvFormat::bf16, DType::f16}};
  for (const Case& c : cases) {
    for (const std::int64_t group : {1, 3, 9}) {
      for (const JoinKind& join : join_kinds()) {
        CaseSpec spec = make_case(c.k, c.qk, group, 2, 300, 2);
        spec.problem.head_dim_v = c.v;
        spec.problem.v_format = c.v_format;
        spec.problem.q_dtype = c.q;
        join.apply(spec);
        spec.name += " v " + std::to_string(c.v) + " " + std::string(to_string(c.v_format));
        expect_oracle(spec);
      }
    }
  }
}

TEST_F(ShapesTest, ValuesThatAreAPrefixOfTheKeys) {
  for (const std::int64_t dim : {576, 192}) {
    for (const JoinKind& join : join_kinds()) {
      CaseSpec spec = make_case(KvFormat::bf16, dim, 8, 1, 700);
      spec.problem.head_dim_v = dim == 576 ? 512 : 128;
      spec.problem.v_is_k_prefix = true;
      join.apply(spec);
      expect_oracle(spec);
    }
  }
}

TEST_F(ShapesTest, SinksCountOnceHoweverTheTokensAreSplit) {
  for (const JoinKind& join : join_kinds()) {
    for (const KvFormat format : {KvFormat::f32, KvFormat::bf16}) {
      CaseSpec spec = make_case(format, 64, 3, 2, 1000, 3);
      spec.problem.num_seqs = 3;
      spec.kv_lens = {1000, 0, 65};
      spec.problem.has_sinks = true;
      spec.sinks = {-1e30F, 0.0F, 3.0F, 60.0F, -60.0F, 1.0F};
      join.apply(spec);
      expect_oracle(spec);
    }
  }
}

TEST_F(ShapesTest, WindowsAndLeftPadding) {
  for (const JoinKind& join : join_kinds()) {
    for (const std::int64_t window : {0, 1, 16, 17, 100, 900, 5000}) {
      for (const std::int64_t q_len : {1, 4}) {
        for (const bool causal : {true, false}) {
          CaseSpec spec = make_case(KvFormat::bf16, 64, 8, 2, 1000, q_len);
          spec.problem.num_seqs = 2;
          spec.kv_lens = {1000, 33};
          spec.kv_starts = {55, 33};
          spec.problem.window = window;
          spec.problem.causal = causal;
          join.apply(spec);
          spec.name += " window " + std::to_string(window) + (causal ? " causal" : "");
          expect_oracle(spec);
        }
      }
    }
  }
}

// More sequences than a grid has in one dimension.
TEST_F(ShapesTest, MoreSequencesThanOneLaunchTakes) {
  CaseSpec spec = make_case(KvFormat::bf16, 64, 1, 1, 3);
  spec.problem.num_seqs = 66000;
  spec.kv_lens.clear();
  for (std::int32_t seq = 0; seq < 66000; ++seq) spec.kv_lens.push_back(seq % 4);
  expect_oracle(spec);
  spec.options.policy.cluster = 0;
  spec.options.policy.chunk_tokens = 16;
  expect_oracle(spec);
}

TEST_F(ShapesTest, NothingToDo) {
  for (const bool no_rows : {true, false}) {
    CaseSpec spec = make_case(KvFormat::bf16, 64, 4, 2, 20);
    (no_rows ? spec.problem.q_len : spec.problem.num_seqs) = 0;
    if (!no_rows) spec.kv_lens.clear();
    expect_oracle(spec);
  }
  CaseSpec empty = make_case(KvFormat::bf16, 64, 4, 2, 0);
  expect_oracle(empty);
  empty.kv_lens.clear();
  expect_oracle(empty);
}

}  // namespace
}  // namespace kvonce::cuda_test
