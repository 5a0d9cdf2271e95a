// The oracle against answers worked out by hand. With scale 1, q = 1 and one feature, key i's score is k[i]; k[i] = ln(w[i])
// therefore gives the weights w, out = sum(w * v) / sum(w) and lse = ln(sum(w)).
#include "core/reference.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "shared/numeric.h"

namespace kvonce::core {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kTolerance = 1e-6;  // the logarithms in K are rounded to float

// One head, one feature, four keys of weights 1 2 3 4 and values 10 20 30 40.
struct Small {
  std::vector<float> q = {1.0F};
  std::vector<float> k = {std::log(1.0F), std::log(2.0F), std::log(3.0F), std::log(4.0F)};
  std::vector<float> v = {10.0F, 20.0F, 30.0F, 40.0F};
  Problem problem;
  Inputs inputs;

  Small() {
    problem.num_q_heads = 1;
    problem.num_kv_heads = 1;
    problem.head_dim_qk = 1;
    problem.head_dim_v = 1;
    problem.max_kv_len = 4;
    problem.scale = 1.0F;
  }

  // All tensors packed [seq, head, token, dim] of the problem's shape.
  ReferenceResult run() {
    const Problem& p = problem;
    const std::int64_t dim_v = p.dim_v();
    q.resize(static_cast<std::size_t>(p.num_seqs * p.num_q_heads * p.q_len * p.head_dim_qk), 1.0F);
    inputs.q = {q.data(), p.num_q_heads * p.q_len * p.head_dim_qk, p.q_len * p.head_dim_qk, p.head_dim_qk};
    inputs.k = {k.data(), p.num_kv_heads * p.max_kv_len * p.head_dim_qk, p.max_kv_len * p.head_dim_qk, p.head_dim_qk};
    inputs.v = {v.data(), p.num_kv_heads * p.max_kv_len * dim_v, p.max_kv_len * dim_v, dim_v};
    return reference_attend(problem, inputs);
  }
};

TEST(ReferenceTest, WeightedMeanAndNaturalLog) {
  Small small;
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.out[0], 30.0, 30 * kTolerance);
  EXPECT_NEAR(result.lse[0], std::log(10.0), kTolerance);
}

TEST(ReferenceTest, ScaleDefaultsToInverseRootOfTheKeyDim) {
  Small small;
  small.problem.head_dim_qk = 4;
  small.problem.scale.reset();
  small.problem.max_kv_len = 2;
  small.q = {2.0F, 0.0F, 0.0F, 0.0F};
  small.k = {std::log(3.0F), 7.0F, 7.0F, 7.0F, 0.0F, -7.0F, 7.0F, 0.0F};  // 2 * k0 / sqrt(4): weights 3 and 1
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.out[0], 12.5, 20 * kTolerance);
  EXPECT_NEAR(result.lse[0], std::log(4.0), kTolerance);
}

TEST(ReferenceTest, CausalIsBottomRight) {
  Small small;
  small.problem.q_len = 2;
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.out[0], 140.0 / 6.0, 30 * kTolerance);
  EXPECT_NEAR(result.out[1], 30.0, 30 * kTolerance);
  EXPECT_NEAR(result.lse[0], std::log(6.0), kTolerance);
}

TEST(ReferenceTest, WithoutCausalEveryRowSeesAll) {
  Small small;
  small.problem.q_len = 3;
  small.problem.causal = false;
  for (const double out : small.run().out) EXPECT_NEAR(out, 30.0, 30 * kTolerance);
}

TEST(ReferenceTest, RowsBeforeTheFirstKeyAreEmpty) {
  Small small;
  small.problem.q_len = 6;
  const ReferenceResult result = small.run();
  for (std::size_t row = 0; row < 2; ++row) {
    EXPECT_EQ(result.out[row], 0.0);
    EXPECT_EQ(result.lse[row], -kInf);
  }
  EXPECT_NEAR(result.out[2], 10.0, 10 * kTolerance);
  EXPECT_NEAR(result.out[5], 30.0, 30 * kTolerance);
}

TEST(ReferenceTest, WindowCountsTheRowItself) {
  Small small;
  small.problem.q_len = 2;
  small.problem.window = 2;
  small.k[0] = kNaN;  // outside both windows
  small.v[0] = kNaN;
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.out[0], 130.0 / 5.0, 30 * kTolerance);
  EXPECT_NEAR(result.out[1], 250.0 / 7.0, 40 * kTolerance);
}

TEST(ReferenceTest, BooleanMaskNeverReadsHiddenKeys) {
  Small small;
  const std::vector<std::uint8_t> mask = {1, 1, 0, 1};
  small.problem.mask = MaskKind::boolean;
  small.inputs.mask = mask.data();
  small.k[2] = kNaN;
  small.v[2] = kNaN;
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.out[0], 30.0, 30 * kTolerance);  // (10 + 40 + 160) / 7
  EXPECT_NEAR(result.lse[0], std::log(7.0), kTolerance);
}

TEST(ReferenceTest, AdditiveMaskAddsAndMinusInfinityHides) {
  Small small;
  const std::vector<float> mask = {std::log(2.0F), 0.0F, 0.0F, -kInf};
  small.problem.mask = MaskKind::additive;
  small.inputs.mask = mask.data();
  small.k[3] = kNaN;
  small.v[3] = kNaN;
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.out[0], 150.0 / 7.0, 30 * kTolerance);  // weights 2 2 3
  EXPECT_NEAR(result.lse[0], std::log(7.0), kTolerance);
}

TEST(ReferenceTest, MasksOf16BitsAreReadAsTheirType) {
  for (const auto& [dtype, one, minus_infinity] :
       {std::tuple{DType::f16, 0x3c00, 0xfc00}, std::tuple{DType::bf16, 0x3f80, 0xff80}}) {
    Small small;
    const std::vector<std::uint16_t> mask = {static_cast<std::uint16_t>(one), 0, 0,
                                             static_cast<std::uint16_t>(minus_infinity)};
    small.problem.mask = MaskKind::additive;
    small.problem.mask_dtype = dtype;
    small.inputs.mask = mask.data();
    small.k[3] = kNaN;
    EXPECT_NEAR(small.run().lse[0], std::log(std::exp(1.0) + 5.0), kTolerance);  // weights e 2 3
  }
}

TEST(ReferenceTest, MaskSlopesMultiplyPerQueryHead) {
  Small small;
  small.problem.num_q_heads = 3;
  const std::vector<float> mask = {std::log(2.0F), 0.0F, 0.0F, -kInf};
  const std::vector<float> slopes = {0.0F, 1.0F, 2.0F};
  small.problem.mask = MaskKind::additive;
  small.problem.has_mask_slopes = true;
  small.inputs.mask = mask.data();  // broadcast over heads
  small.inputs.mask_slopes = slopes.data();
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.lse[0], std::log(6.0), kTolerance);  // a slope of 0 still hides the last key
  EXPECT_NEAR(result.lse[1], std::log(7.0), kTolerance);
  EXPECT_NEAR(result.lse[2], std::log(9.0), kTolerance);
}

TEST(ReferenceTest, FullyMaskedRowIsZero) {
  Small small;
  const std::vector<float> mask(4, -kInf);
  small.problem.mask = MaskKind::additive;
  small.inputs.mask = mask.data();
  const ReferenceResult result = small.run();
  EXPECT_EQ(result.out[0], 0.0);
  EXPECT_EQ(result.lse[0], -kInf);
}

TEST(ReferenceTest, TreeMaskCoversOnlyTheNewestKeys) {
  Small small;
  small.problem.q_len = 3;
  small.problem.causal = false;
  small.problem.mask = MaskKind::tree;
  const std::vector<std::uint8_t> tree = {1, 0, 0, 1, 1, 0, 1, 0, 1};  // tokens 1 and 2 are siblings
  small.inputs.mask = tree.data();
  small.inputs.mask_row_stride = 3;
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.lse[0], std::log(3.0), kTolerance);  // keys 0, 1
  EXPECT_NEAR(result.lse[1], std::log(6.0), kTolerance);  // keys 0, 1, 2
  EXPECT_NEAR(result.lse[2], std::log(7.0), kTolerance);  // keys 0, 1, 3
  EXPECT_NEAR(result.out[2], 210.0 / 7.0, 30 * kTolerance);
}

TEST(ReferenceTest, SoftcapComesBeforeTheMask) {
  Small small;
  small.problem.max_kv_len = 3;
  small.problem.softcap = 1.0F;
  small.problem.mask = MaskKind::additive;
  const std::vector<float> mask = {0.0F, 0.0F, -kInf};
  small.inputs.mask = mask.data();
  small.k = {0.0F, 0.5F * std::log(3.0F), 1.0F};  // tanh(ln(3) / 2) = 1/2
  small.v = {0.0F, 1.0F, 1000.0F};
  const ReferenceResult result = small.run();
  const double w = std::exp(0.5);
  EXPECT_NEAR(result.out[0], w / (1.0 + w), kTolerance);
  EXPECT_NEAR(result.lse[0], std::log(1.0 + w), kTolerance);
}

TEST(ReferenceTest, AlibiUsesTheRowsOwnPosition) {
  Small small;
  small.problem.num_q_heads = 2;
  small.problem.q_len = 2;
  small.problem.has_alibi = true;
  const std::vector<float> slopes = {std::log(2.0F), 0.0F};
  small.inputs.alibi_slopes = slopes.data();
  small.k.assign(4, 0.0F);
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.lse[0], std::log(1.75), kTolerance);   // position 2: 1/4 + 1/2 + 1
  EXPECT_NEAR(result.lse[1], std::log(1.875), kTolerance);  // position 3
  EXPECT_NEAR(result.lse[2], std::log(3.0), kTolerance);
  EXPECT_NEAR(result.out[0], (2.5 + 10.0 + 30.0) / 1.75, 30 * kTolerance);
}

TEST(ReferenceTest, SinkIsOneMoreLogitWithoutAValue) {
  Small small;
  small.problem.num_q_heads = 2;
  small.problem.has_sinks = true;
  const std::vector<float> sinks = {std::log(10.0F), -kInf};
  small.inputs.sinks = sinks.data();
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.out[0], 15.0, 15 * kTolerance);
  EXPECT_NEAR(result.lse[0], std::log(20.0), kTolerance);
  EXPECT_NEAR(result.out[1], 30.0, 30 * kTolerance);
}

TEST(ReferenceTest, SinkWithoutKeysIsTheLse) {
  Small small;
  small.problem.num_seqs = 1;
  small.problem.has_sinks = true;
  const std::vector<float> sinks = {1e38F};
  const std::int32_t kv_len = 0;
  small.inputs.sinks = sinks.data();
  small.inputs.kv_lens = &kv_len;
  const ReferenceResult result = small.run();
  EXPECT_EQ(result.out[0], 0.0);
  EXPECT_EQ(result.lse[0], static_cast<double>(1e38F));
}

TEST(ReferenceTest, LengthsAndStartsPerSequence) {
  Small small;
  small.problem.num_seqs = 3;
  const std::vector<std::int32_t> kv_lens = {4, 2, 0};
  const std::vector<std::int32_t> kv_starts = {2, 0, 0};
  small.inputs.kv_lens = kv_lens.data();
  small.inputs.kv_starts = kv_starts.data();
  const float ln3 = std::log(3.0F);
  small.k = {kNaN, kNaN, 0.0F, ln3, 0.0F, ln3, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN};
  small.v = {kNaN, kNaN, 4.0F, 8.0F, 40.0F, 80.0F, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN};
  const ReferenceResult result = small.run();
  EXPECT_NEAR(result.out[0], 7.0, 10 * kTolerance);
  EXPECT_NEAR(result.out[1], 70.0, 100 * kTolerance);
  EXPECT_EQ(result.out[2], 0.0);
  EXPECT_EQ(result.lse[2], -kInf);
}

TEST(ReferenceTest, QueryHeadReadsItsGroupsKvHead) {
  Small small;
  small.problem.num_q_heads = 6;
  small.problem.num_kv_heads = 2;
  small.problem.max_kv_len = 1;
  small.k = {0.0F, 0.0F};
  small.v = {1.0F, 2.0F};
  const ReferenceResult result = small.run();
  const std::vector<double> expected = {1, 1, 1, 2, 2, 2};
  EXPECT_EQ(result.out, expected);
}

TEST(ReferenceTest, StridesSkipGaps) {
  Problem problem;
  problem.num_seqs = 2;
  problem.num_q_heads = 2;
  problem.num_kv_heads = 2;
  problem.head_dim_qk = 1;
  problem.max_kv_len = 2;
  problem.scale = 1.0F;
  const float ln3 = std::log(3.0F);
  const std::vector<float> q(4, 1.0F);
  // [seq, token, head, 1 + 1 gap], BSHD; one K for all heads (stride 0).
  const std::vector<float> k = {0.0F, kNaN, ln3, kNaN, ln3, kNaN, 0.0F, kNaN};
  const std::vector<float> v = {4, kNaN, 40, kNaN, 8, kNaN, 80, kNaN, 4, kNaN, 40, kNaN, 8, kNaN, 80, kNaN};
  Inputs inputs;
  inputs.q = {q.data(), 2, 1, 1};
  inputs.k = {k.data(), 4, 0, 2};
  inputs.v = {v.data(), 8, 2, 4};
  const ReferenceResult result = reference_attend(problem, inputs);
  const std::vector<double> expected = {7, 70, 5, 50};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(result.out[i], expected[i], 100 * kTolerance) << i;
}

TEST(ReferenceTest, ValueMayBeTheKeysPrefix) {
  Small small;
  small.problem.head_dim_qk = 2;
  small.problem.max_kv_len = 2;
  small.problem.v_is_k_prefix = true;
  small.q = {0.0F, 1.0F};
  small.k = {4.0F, 0.0F, 8.0F, std::log(3.0F)};
  small.v = {kNaN, kNaN};
  EXPECT_NEAR(small.run().out[0], 7.0, 10 * kTolerance);
}

TEST(ReferenceTest, VisibleNaNIsNotHidden) {
  Small small;
  small.k[1] = kNaN;
  const ReferenceResult result = small.run();
  EXPECT_TRUE(std::isnan(result.out[0]));
  EXPECT_TRUE(std::isnan(result.lse[0]));
}

// Both paged layouts: 2 heads, pages of 3 tokens in the order 2, 0; page 1 and the tail of page 0 are poison.
TEST(ReferenceTest, PagedLayoutsFollowTheBlockTable) {
  for (const bool head_first : {false, true}) {
    Problem problem;
    problem.num_q_heads = 2;
    problem.num_kv_heads = 2;
    problem.head_dim_qk = 1;
    problem.max_kv_len = 6;
    problem.scale = 1.0F;
    problem.page_size = 3;
    problem.layout = head_first ? KvLayout::paged_hnd : KvLayout::paged_nhd;
    const std::int64_t head_stride = head_first ? 3 : 1;
    const std::int64_t token_stride = head_first ? 1 : 2;
    std::vector<float> k(18, kNaN);
    std::vector<float> v(18, kNaN);
    const std::vector<std::int32_t> block_table = {2, 0};
    for (std::int64_t token = 0; token < 4; ++token) {
      for (std::int64_t head = 0; head < 2; ++head) {
        const std::int64_t page = block_table[static_cast<std::size_t>(token / 3)];
        const auto at = static_cast<std::size_t>(page * 6 + head * head_stride + token % 3 * token_stride);
        k[at] = std::log(static_cast<float>(token + 1));
        v[at] = static_cast<float>((token + 1) * (head == 0 ? 10 : 1));
      }
    }
    const std::vector<float> q(2, 1.0F);
    const std::int32_t kv_len = 4;
    Inputs inputs;
    inputs.q = {q.data(), 2, 1, 1};
    inputs.k = {k.data(), 6, head_stride, token_stride};
    inputs.v = {v.data(), 6, head_stride, token_stride};
    inputs.kv_lens = &kv_len;
    inputs.block_table = block_table.data();
    inputs.block_table_stride = 2;
    inputs.num_pages = 3;
    const ReferenceResult result = reference_attend(problem, inputs);
    EXPECT_NEAR(result.out[0], 30.0, 30 * kTolerance) << head_first;
    EXPECT_NEAR(result.out[1], 3.0, 3 * kTolerance) << head_first;
  }
}

// Two sequences share a prefix of two tokens; each has its own tail, of two tokens and of one.
TEST(ReferenceTest, SegmentsConcatenateInOrder) {
  Small small;
  small.problem.num_seqs = 2;
  small.problem.q_len = 2;
  small.problem.has_segments = true;
  const std::vector<Segment> segments = {{0, 2, 0, 0, 2}, {0, 1, 1, 0, 2}, {1, 2, 1, 3, 4}};
  small.inputs.segments = segments.data();
  small.inputs.num_segments = 3;
  const float ln2 = std::log(2.0F);
  small.k = {0.0F, ln2, kNaN, kNaN, 0.0F, ln2, kNaN, std::log(5.0F)};
  small.v = {10, 20, kNaN, kNaN, 30, 40, kNaN, 50};
  const ReferenceResult result = small.run();
  // Sequence 0: weights 1 2 1 2, rows at positions 2 and 3. Sequence 1: weights 1 2 5, rows at positions 1 and 2.
  const std::vector<double> expected = {80.0 / 4.0, 160.0 / 6.0, 50.0 / 3.0, 300.0 / 8.0};
  for (std::size_t row = 0; row < 4; ++row) EXPECT_NEAR(result.out[row], expected[row], 50 * kTolerance) << row;
}

TEST(ReferenceTest, DecodesEveryFormat) {
  const std::vector<float> f32 = {1.5F, -2.0F};
  EXPECT_EQ(decode_value(KvFormat::f32, f32.data(), 1), -2.0);
  const std::vector<std::uint16_t> f16 = {0x3c00, 0xc000, 0x0001};
  EXPECT_EQ(decode_value(KvFormat::f16, f16.data(), 1), -2.0);
  EXPECT_EQ(decode_value(KvFormat::f16, f16.data(), 2), std::ldexp(1.0, -24));
  const std::vector<std::uint16_t> bf16 = {0x3f80, 0x4049};
  EXPECT_EQ(decode_value(KvFormat::bf16, bf16.data(), 1), 3.140625);
  const std::vector<std::uint8_t> f8 = {0x38, 0x7e, 0x81};
  EXPECT_EQ(decode_value(KvFormat::f8_e4m3, f8.data(), 0, 3.0), 3.0);
  EXPECT_EQ(decode_value(KvFormat::f8_e4m3, f8.data(), 1), 448.0);
  EXPECT_EQ(decode_value(KvFormat::f8_e4m3, f8.data(), 2), -std::ldexp(1.0, -9));
  const std::vector<std::uint8_t> codes = {0x00, 0xa3};
  EXPECT_EQ(decode_value(KvFormat::mlx_int8, codes.data(), 1, 0.5, -1.0), 80.5);  // 163 / 2 - 1
  EXPECT_EQ(decode_value(KvFormat::mlx_int4, codes.data(), 2, 0.5, -1.0), 0.5);   // low nibble 3
  EXPECT_EQ(decode_value(KvFormat::mlx_int4, codes.data(), 3, 0.5, -1.0), 4.0);   // high nibble 10

  std::vector<std::uint8_t> q8(68, 0);  // two blocks, scales 0.5 and 2
  q8[1] = 0x38;
  q8[34 + 1] = 0x40;
  q8[2 + 31] = 0xff;
  q8[34 + 2] = 0x80;
  EXPECT_EQ(decode_value(KvFormat::q8_0, q8.data(), 31), -0.5);
  EXPECT_EQ(decode_value(KvFormat::q8_0, q8.data(), 32), -256.0);

  std::vector<std::uint8_t> q4(36, 0x88);  // code 8 is zero
  q4[0] = 0x00;
  q4[1] = 0x38;
  q4[18] = 0x00;
  q4[19] = 0x40;
  q4[2 + 3] = 0xf0;
  q4[20 + 15] = 0x91;
  EXPECT_EQ(decode_value(KvFormat::q4_0, q4.data(), 0), 0.0);
  EXPECT_EQ(decode_value(KvFormat::q4_0, q4.data(), 3), -4.0);      // low nibble 0
  EXPECT_EQ(decode_value(KvFormat::q4_0, q4.data(), 16 + 3), 3.5);  // high nibble 15
  EXPECT_EQ(decode_value(KvFormat::q4_0, q4.data(), 32 + 15), -14.0);
  EXPECT_EQ(decode_value(KvFormat::q4_0, q4.data(), 63), 2.0);
}

// MLX codes of two heads with gaps between their rows; scales and biases with strides of their own.
TEST(ReferenceTest, MlxScalesAndBiasesHaveTheirOwnStrides) {
  Problem problem;
  problem.num_q_heads = 2;
  problem.num_kv_heads = 2;
  problem.head_dim_qk = 64;
  problem.max_kv_len = 1;
  problem.k_format = KvFormat::mlx_int8;
  problem.v_format = KvFormat::mlx_int8;
  problem.quant_group = 32;
  problem.scales_dtype = DType::f16;
  const std::vector<float> q(128, 0.0F);
  std::vector<std::uint8_t> codes(192, 0);
  codes[0] = 10;
  codes[32] = 20;
  codes[96] = 30;
  codes[96 + 32] = 40;
  const std::vector<std::uint16_t> scales = {0x3c00, 0x4000, 0x7e00, 0x3800, 0x4400};  // 1 2 NaN 0.5 4
  const std::vector<std::uint16_t> biases = {0x0000, 0x3c00, 0xbc00, 0x0000};          // 0 1 -1 0
  Inputs inputs;
  inputs.q = {q.data(), 128, 64, 64};
  inputs.k = inputs.v = {codes.data(), 192, 96, 64};
  inputs.k_scales = inputs.v_scales = {scales.data(), 6, 3, 2};
  inputs.k_biases = inputs.v_biases = {biases.data(), 4, 2, 2};
  const ReferenceResult result = reference_attend(problem, inputs);
  EXPECT_EQ(result.out[0], 10.0);
  EXPECT_EQ(result.out[32], 41.0);
  EXPECT_EQ(result.out[64], 14.0);
  EXPECT_EQ(result.out[64 + 32], 160.0);

  // The same numbers as bf16 and f32.
  const std::vector<std::uint16_t> bf16_scales = {0x3f80, 0x4000, 0x7fc0, 0x3f00, 0x4080};
  const std::vector<std::uint16_t> bf16_biases = {0x0000, 0x3f80, 0xbf80, 0x0000};
  problem.scales_dtype = DType::bf16;
  inputs.k_scales.data = inputs.v_scales.data = bf16_scales.data();
  inputs.k_biases.data = inputs.v_biases.data = bf16_biases.data();
  EXPECT_EQ(reference_attend(problem, inputs).out, result.out);
  const std::vector<float> f32_scales = {1.0F, 2.0F, NAN, 0.5F, 4.0F};
  const std::vector<float> f32_biases = {0.0F, 1.0F, -1.0F, 0.0F};
  problem.scales_dtype = DType::f32;
  inputs.k_scales.data = inputs.v_scales.data = f32_scales.data();
  inputs.k_biases.data = inputs.v_biases.data = f32_biases.data();
  EXPECT_EQ(reference_attend(problem, inputs).out, result.out);
}

TEST(ReferenceTest, Fp8ScaleIsPerKvHead) {
  Problem problem;
  problem.num_q_heads = 2;
  problem.num_kv_heads = 2;
  problem.head_dim_qk = 1;
  problem.max_kv_len = 1;
  problem.k_format = KvFormat::f8_e4m3;
  problem.v_format = KvFormat::f8_e4m3;
  problem.scale = 1.0F;
  const std::vector<float> q(2, 1.0F);
  const std::vector<std::uint8_t> ones(2, 0x38);
  const std::vector<float> k_scales = {1.0F, 2.0F};
  const std::vector<float> v_scales = {4.0F, 0.25F};
  Inputs inputs;
  inputs.q = {q.data(), 2, 1, 1};
  inputs.k = inputs.v = {ones.data(), 2, 1, 1};
  inputs.k_scales.data = k_scales.data();
  inputs.v_scales.data = v_scales.data();
  const ReferenceResult result = reference_attend(problem, inputs);
  EXPECT_EQ(result.out[0], 4.0);
  EXPECT_EQ(result.out[1], 0.25);
  EXPECT_EQ(result.lse[0], 1.0);
  EXPECT_EQ(result.lse[1], 2.0);
}

TEST(ReferenceTest, NothingToDoIsEmpty) {
  Small small;
  small.problem.num_seqs = 0;
  EXPECT_TRUE(small.run().out.empty());
  small.problem.num_seqs = 1;
  small.problem.q_len = 0;
  EXPECT_TRUE(small.run().lse.empty());
}

}  // namespace
}  // namespace kvonce::core
