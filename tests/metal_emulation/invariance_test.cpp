// What must not change a bit, or must change only what it should: lengths, poison, strides, other sequences, the order of lanes.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/reference.hpp"
#include "emulated_case.hpp"
#include "shared/numeric.h"

namespace kvonce::emulation {
namespace {

using conformance::CaseResult;
using conformance::CaseSpec;
using conformance::CaseTensors;
using conformance::normal_value;
using conformance::Poison;
using conformance::Random;

class MetalBodyTest : public testing::TestWithParam<Body> {
 protected:
  static CaseSpec typical(std::int64_t q_len, DType dtype, std::int64_t dim, std::int64_t group,
                          std::int64_t kv_heads) {
    CaseSpec spec;
    Problem& p = spec.problem;
    p.num_seqs = 3;
    p.num_kv_heads = kv_heads;
    p.num_q_heads = group * kv_heads;
    p.q_len = q_len;
    p.head_dim_qk = dim;
    p.head_dim_v = dim;
    p.max_kv_len = 140;
    p.q_dtype = dtype;
    p.out_dtype = dtype;
    p.k_format = static_cast<KvFormat>(dtype);
    p.v_format = p.k_format;
    spec.kv_lens = {137, 0, 66};
    spec.name = "d" + std::to_string(dim) + " q=" + std::to_string(q_len) + " group " + std::to_string(group);
    return spec;
  }

  static void expect_oracle(const CaseSpec& spec) {
    const Choice choice = choose(spec, GetParam());
    const CaseResult result = check_emulated(spec, choice);
    EXPECT_EQ(result.status, CaseResult::passed) << result.name << ' ' << choice.name() << ": " << result.detail;
  }

  static std::vector<unsigned char> result_bytes(const CaseSpec& spec, const Choice& choice) {
    CaseTensors tensors(spec);
    EXPECT_EQ(run_emulated(spec, tensors, choice), "") << spec.name;
    return tensors.result_bytes();
  }

  // Zero, NaN and the largest values outside the valid elements give the same bits.
  static void expect_poison_blind(CaseSpec spec) {
    const Choice choice = choose(spec, GetParam());
    spec.poison = Poison::zero;
    const auto zero = result_bytes(spec, choice);
    spec.poison = Poison::nan;
    EXPECT_EQ(zero, result_bytes(spec, choice)) << spec.name << ' ' << choice.name() << " NaN";
    spec.poison = Poison::large;
    EXPECT_EQ(zero, result_bytes(spec, choice)) << spec.name << ' ' << choice.name() << " large";
  }
};

TEST_P(MetalBodyTest, EveryLengthTo130) {
  for (std::int64_t kv_len = 1; kv_len <= 130; ++kv_len) {
    CaseSpec spec = typical(kv_len % 3 + 1, kv_len % 2 == 0 ? DType::f16 : DType::f32, 64, 3, 2);
    spec.problem.num_seqs = 2;
    spec.problem.max_kv_len = kv_len;
    spec.kv_lens = {static_cast<std::int32_t>(kv_len), static_cast<std::int32_t>(kv_len / 2)};
    spec.seed = static_cast<std::uint64_t>(kv_len);
    expect_oracle(spec);
  }
}

TEST_P(MetalBodyTest, OddGroupsOfSeveralKvHeads) {
  for (const std::int64_t group : {1, 2, 3, 5, 6, 7, 9, 12, 17, 71}) {
    for (const std::int64_t kv_heads : {2, 3}) {
      CaseSpec spec = typical(group < 10 ? 3 : 1, DType::bf16, 64, group, kv_heads);
      spec.seed = static_cast<std::uint64_t>(group * 10 + kv_heads);
      expect_oracle(spec);
    }
  }
}

TEST_P(MetalBodyTest, QueriesLongerThanTheCache) {
  for (const std::int64_t q_len : {16, 64}) {
    CaseSpec spec = typical(q_len, DType::f16, 64, 2, 1);
    spec.kv_lens = {5, 63, 1};
    spec.seed = static_cast<std::uint64_t>(q_len);
    expect_oracle(spec);
  }
}

TEST_P(MetalBodyTest, PoisonOutsideTheVisibleKeys) {
  std::uint64_t seed = 1;
  for (const DType dtype : {DType::f16, DType::f32}) {
    for (const std::int64_t q_len : {1, 3}) {
      for (const std::int64_t window : {0, 17}) {
        for (const MaskKind mask : {MaskKind::none, MaskKind::boolean, MaskKind::additive}) {
          CaseSpec spec = typical(q_len, dtype, 128, 5, 2);
          spec.seed = seed++;
          spec.kv_starts = {17, 0, 66};
          spec.k.spare_tokens = 9;
          spec.v.row_gap = 3;
          spec.problem.window = window;
          spec.problem.mask = mask;
          if (mask == MaskKind::additive) spec.problem.mask_dtype = dtype;
          expect_poison_blind(spec);
        }
      }
    }
  }
}

// A key that some rows see and others do not is NaN, or its value is: rows that do not see it keep the bits that they have with
// zeros there, rows that see it are NaN.
TEST_P(MetalBodyTest, ANaNReachesExactlyTheRowsThatSeeIt) {
  for (const std::int64_t q_len : {2, 5, 8}) {
    for (const bool in_v : {false, true}) {
      for (const bool by_mask : {false, true}) {
        CaseSpec spec = typical(q_len, DType::f16, 64, 3, 2);
        spec.problem.num_seqs = 1;
        spec.kv_lens = {101};
        spec.seed = static_cast<std::uint64_t>(q_len * 4 + (in_v ? 2 : 0) + (by_mask ? 1 : 0));
        const std::int64_t marked = by_mask ? 50 : 101 - q_len / 2 - 1;
        if (by_mask) {
          spec.problem.mask = MaskKind::boolean;
          spec.mask_value = [](std::int64_t, std::int64_t, std::int64_t row, std::int64_t token) {
            return token != 50 || row % 2 == 0 ? 1.0 : 0.0;
          };
        }
        double mark = 0.0;
        const auto value = [&mark, marked, seed = spec.seed](bool is_marked) {
          return [&mark, marked, seed, is_marked](std::int64_t, std::int64_t head, std::int64_t token, std::int64_t d) {
            if (is_marked && token == marked && d % 7 == 3) return mark;
            return normal_value(seed + 9, static_cast<std::uint64_t>((head * 200 + token) * 64 + d));
          };
        };
        spec.k_value = value(!in_v);
        spec.v_value = value(in_v);
        const Choice choice = choose(spec, GetParam());
        CaseTensors clean(spec);
        ASSERT_EQ(run_emulated(spec, clean, choice), "");
        mark = std::numeric_limits<double>::quiet_NaN();
        CaseTensors dirty(spec);
        ASSERT_EQ(run_emulated(spec, dirty, choice), "");
        for (std::int64_t head = 0; head < 6; ++head) {
          for (std::int64_t row = 0; row < q_len; ++row) {
            const bool sees = by_mask ? row % 2 == 0 : marked <= 101 - q_len + row;
            const double got = dirty.out_value(0, head, row, 3);
            if (sees) {
              EXPECT_TRUE(std::isnan(got)) << choice.name() << " head " << head << " row " << row << " in_v " << in_v;
            } else {
              for (std::int64_t d = 0; d < 64; ++d) {
                ASSERT_EQ(dirty.out_value(0, head, row, d), clean.out_value(0, head, row, d))
                    << choice.name() << " head " << head << " row " << row << " in_v " << in_v;
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(MetalBodyTest, TheOrderOfLanesChangesNoBit) {
  CaseSpec spec = typical(2, DType::f16, 128, 7, 2);
  Choice choice = choose(spec, GetParam());
  const auto first = result_bytes(spec, choice);
  for (std::uint64_t seed = 2; seed < 8; ++seed) {
    choice.order_seed = seed * 1000;
    EXPECT_EQ(first, result_bytes(spec, choice));
  }
}

TEST_P(MetalBodyTest, ASequenceDoesNotDependOnItsBatch) {
  CaseSpec spec = typical(2, DType::bf16, 128, 3, 2);
  spec.kv_lens = {137, 12, 66};
  const Choice choice = choose(spec, GetParam());
  const auto value = [seed = spec.seed](std::uint64_t stream, std::int64_t dim) {
    return [seed, stream, dim](std::int64_t, std::int64_t head, std::int64_t token, std::int64_t d) {
      return normal_value(seed + stream, static_cast<std::uint64_t>((head * 500 + token) * dim + d));
    };
  };
  // The same tensors in every sequence; only lengths differ.
  spec.q_value = value(1, 128);
  spec.k_value = value(2, 128);
  spec.v_value = value(3, 128);
  CaseTensors three(spec);
  ASSERT_EQ(run_emulated(spec, three, choice), "");
  for (std::int64_t seq = 0; seq < 3; ++seq) {
    CaseSpec alone = spec;
    alone.problem.num_seqs = 1;
    alone.kv_lens = {spec.kv_lens[static_cast<std::size_t>(seq)]};
    CaseTensors one(alone);
    ASSERT_EQ(run_emulated(alone, one, choice), "");
    for (std::int64_t head = 0; head < 6; ++head) {
      for (std::int64_t row = 0; row < 2; ++row) {
        ASSERT_EQ(one.lse_value(0, head, row), three.lse_value(seq, head, row));
        for (std::int64_t d = 0; d < 128; ++d)
          ASSERT_EQ(one.out_value(0, head, row, d), three.out_value(seq, head, row, d));
      }
    }
  }
}

// MLX's arrays may have any strides, between dims too: a transposed cache.
TEST_P(MetalBodyTest, StridesBetweenDims) {
  CaseSpec spec = typical(2, DType::f16, 80, 3, 2);
  spec.problem.num_seqs = 1;
  spec.kv_lens = {101};
  const Choice choice = choose(spec, GetParam());
  CaseTensors tensors(spec);
  const Inputs& packed = tensors.inputs();
  std::vector<std::uint16_t> want(static_cast<std::size_t>(6 * 2 * 80));
  std::vector<float> want_lse(12);
  ASSERT_EQ(run_launch(make_launch(spec.problem, packed, choice), packed, 1, want.data(), want_lse.data()), "");

  Inputs strided = packed;
  Launch launch = make_launch(spec.problem, packed, choice);
  std::vector<std::vector<std::uint16_t>> copies;
  // [.., token, dim] to [.., dim, token].
  const auto transpose = [&copies](TensorView& view, Strides& strides, std::int64_t heads, std::int64_t tokens) {
    std::vector<std::uint16_t> copy(static_cast<std::size_t>(heads * tokens * 80), 0xffff);
    const auto* from = static_cast<const std::uint16_t*>(view.data);
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (std::int64_t d = 0; d < 80; ++d) {
          copy[static_cast<std::size_t>((head * 80 + d) * tokens + token)] =
              from[head * view.head_stride + token * view.token_stride + d];
        }
      }
    }
    copies.push_back(std::move(copy));
    view.data = copies.back().data();
    strides = {heads * tokens * 80, tokens * 80, 1, tokens};
  };
  transpose(strided.q, launch.strides[0], 6, 2);
  transpose(strided.k, launch.strides[1], 2, 101);
  transpose(strided.v, launch.strides[2], 2, 101);
  std::vector<std::uint16_t> got(want.size());
  std::vector<float> got_lse(12);
  ASSERT_EQ(run_launch(launch, strided, 1, got.data(), got_lse.data()), "");
  EXPECT_EQ(want, got);
  EXPECT_EQ(want_lse, got_lse);
}

// Token strides of 2^26 elements, sequence strides of 2^32: offsets that 32 bits do not hold.
TEST_P(MetalBodyTest, OffsetsBeyond32Bits) {
  CaseSpec spec = typical(1, DType::f16, 64, 3, 2);
  spec.problem.num_seqs = 2;
  spec.problem.max_kv_len = 40;
  spec.kv_lens = {40, 37};
  const Choice choice = choose(spec, GetParam());
  CaseTensors tensors(spec);
  const Inputs& packed = tensors.inputs();
  std::vector<std::uint16_t> want(static_cast<std::size_t>(2 * 6 * 64));
  std::vector<float> want_lse(12);
  ASSERT_EQ(run_launch(make_launch(spec.problem, packed, choice), packed, 1, want.data(), want_lse.data()), "");

  constexpr std::int64_t kTokenStride = std::int64_t{1} << 26;
  constexpr std::int64_t kSeqStride = std::int64_t{1} << 32;
  constexpr std::size_t kBytes = static_cast<std::size_t>(2 * (2 * kSeqStride));
  void* mapping = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  auto* const sparse = static_cast<std::uint16_t*>(mapping);
  Inputs far = packed;
  for (std::int64_t kind = 0; kind < 2; ++kind) {
    const TensorView& from = kind == 0 ? packed.k : packed.v;
    std::uint16_t* const to = sparse + kind * 512;
    for (std::int64_t seq = 0; seq < 2; ++seq) {
      for (std::int64_t head = 0; head < 2; ++head) {
        for (std::int64_t token = 0; token < spec.kv_lens[static_cast<std::size_t>(seq)]; ++token) {
          std::memcpy(to + seq * kSeqStride + head * 128 + token * kTokenStride,
                      static_cast<const std::uint16_t*>(from.data) + seq * from.seq_stride + head * from.head_stride +
                          token * from.token_stride,
                      128);
        }
      }
    }
    (kind == 0 ? far.k : far.v) = {to, kSeqStride, 128, kTokenStride};
  }
  std::vector<std::uint16_t> got(want.size());
  std::vector<float> got_lse(12);
  ASSERT_EQ(run_launch(make_launch(spec.problem, far, choice), far, 1, got.data(), got_lse.data()), "");
  munmap(mapping, kBytes);
  EXPECT_EQ(want, got);
  EXPECT_EQ(want_lse, got_lse);
}

// Lengths and starts outside the cache are clamped, not followed.
TEST_P(MetalBodyTest, LengthsOutsideTheCacheAreClamped) {
  CaseSpec spec = typical(1, DType::f16, 64, 3, 2);
  spec.kv_lens = {140, 140, 0};
  spec.kv_starts = {0, 140, 0};
  const Choice choice = choose(spec, GetParam());
  CaseTensors tensors(spec);
  std::vector<std::uint16_t> want(static_cast<std::size_t>(3 * 6 * 64));
  std::vector<float> want_lse(18);
  const Launch launch = make_launch(spec.problem, tensors.inputs(), choice);
  ASSERT_EQ(run_launch(launch, tensors.inputs(), 1, want.data(), want_lse.data()), "");
  Inputs wild = tensors.inputs();
  const std::int32_t lens[] = {2000000000, 141, -5};
  const std::int32_t starts[] = {-7, 2000000000, 3};
  wild.kv_lens = lens;
  wild.kv_starts = starts;
  std::vector<std::uint16_t> got(want.size());
  std::vector<float> got_lse(18);
  ASSERT_EQ(run_launch(launch, wild, 1, got.data(), got_lse.data()), "");
  EXPECT_EQ(want, got);
  EXPECT_EQ(want_lse, got_lse);
  EXPECT_EQ(got_lse[6], -std::numeric_limits<float>::infinity());
}

INSTANTIATE_TEST_SUITE_P(Bodies, MetalBodyTest, testing::Values(Body::vector, Body::matrix, Body::per_head),
                         [](const testing::TestParamInfo<Body>& body) { return std::string(to_string(body.param)); });

TEST(MetalLaunchTest, LimitsAreRefused) {
  Problem p;
  p.num_q_heads = 8;
  p.num_kv_heads = 1;
  p.head_dim_qk = 512;
  p.head_dim_v = 512;
  p.max_kv_len = 10;
  p.q_dtype = p.out_dtype = DType::f16;
  p.k_format = p.v_format = KvFormat::f16;
  const Inputs none;
  Choice choice;
  choice.row_tiles = 2;
  choice.token_parts = 2;
  EXPECT_THROW(make_launch(p, none, choice), Error);
  choice.row_tiles = 1;
  choice.token_parts = 4;
  EXPECT_EQ(make_launch(p, none, choice).num_simdgroups, 4);
  choice.token_parts = 5;  // 5 * 512 floats
  EXPECT_THROW(make_launch(p, none, choice), Error);
  choice = {};
  choice.body = Body::matrix;
  choice.row_tiles = 2;
  EXPECT_EQ(make_launch(p, none, choice).shared_floats * 4, 32768);
  choice.row_tiles = 17;
  EXPECT_THROW(make_launch(p, none, choice), Error);
}

}  // namespace
}  // namespace kvonce::emulation
