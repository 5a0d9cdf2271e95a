// MLX's quantised caches: codes with scales and biases in arrays of their own.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "shared/token_range.h"
#include "target_test.hpp"

namespace kvonce::conformance {
namespace {

constexpr KvFormat kAffine[] = {KvFormat::mlx_int8, KvFormat::mlx_int4};

class AffineTest : public TargetTest {
 protected:
  static CaseSpec affine(KvFormat k_format, KvFormat v_format, std::int64_t quant_group, DType scales_dtype,
                         std::int64_t group, std::int64_t q_len = 1, std::int64_t dim = 128) {
    CaseSpec spec = typical(q_len, KvFormat::f32, dim, group, 2);
    spec.problem.k_format = k_format;
    spec.problem.v_format = v_format;
    spec.problem.quant_group = quant_group;
    spec.problem.scales_dtype = scales_dtype;
    spec.name += " k=" + std::string(to_string(k_format)) + " v=" + std::string(to_string(v_format)) + " group " +
                 std::to_string(quant_group) + " of " + std::string(to_string(scales_dtype)) + " rows " +
                 std::to_string(group * q_len);
    return spec;
  }

  static void set_lengths(CaseSpec& spec, std::int64_t kv_len) {
    spec.problem.max_kv_len = kv_len + 3;
    spec.kv_lens = {static_cast<std::int32_t>(kv_len), 0, static_cast<std::int32_t>(kv_len / 2)};
    spec.name += " kv=" + std::to_string(kv_len);
  }

  static shared::TokenRange visible(const CaseSpec& spec, std::int64_t seq, std::int64_t row) {
    return shared::visible_range(row, spec.problem.q_len, spec.kv_lens[static_cast<std::size_t>(seq)], 0, true, 0);
  }

  static void expect_exact(const CaseSpec& spec, const ExpectedFn& expected, Weights weights = Weights::zero_or_one) {
    const CaseResult result = check_exact(spec, device(), expected, weights);
    EXPECT_EQ(result.status, CaseResult::passed) << spec.name << ' ' << result.kernel_id << ' ' << result.detail;
  }

  // All weights equal; feature d of V probes key first + d, so out is 2^k / n where the row sees it and 0 elsewhere.
  static void expect_counts(CaseSpec spec, std::int64_t kv_len) {
    const double power = std::exp2(std::ceil(std::log2(static_cast<double>(kv_len))));
    const std::int64_t dim = spec.problem.dim_v();
    spec.q_value = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return 0.0; };
    for (std::int64_t first = 0; first < kv_len; first += dim) {
      spec.v_value = [first, power](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
        return token == first + d ? power : 0.0;
      };
      expect_exact(spec, [&](std::int64_t seq, std::int64_t, std::int64_t row, std::int64_t d) {
        const auto range = visible(spec, seq, row);
        const std::int64_t token = first + d;
        if (token < range.begin || token >= range.end) return 0.0;
        return power / static_cast<double>(range.end - range.begin);
      });
    }
  }
};

TEST_P(AffineTest, EveryLengthCountsEachKeyOnce) {
  for (std::int64_t kv_len = 1; kv_len <= 130; kv_len += quick() ? 7 : 1) {
    for (const KvFormat format : kAffine) {
      CaseSpec spec = affine(format, format, 32LL << (kv_len % 3), DType::bf16, 1 + kv_len % 9, 1 + kv_len % 2);
      set_lengths(spec, kv_len);
      spec.options.chunk_tokens = kv_len % 4 == 0 ? 0 : kv_len % 4 * 24;
      expect_counts(spec, kv_len);
    }
  }
}

TEST_P(AffineTest, EveryLengthAgreesWithTheOracle) {
  constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16};
  for (std::int64_t kv_len = 1; kv_len <= 130; kv_len += quick() ? 7 : 1) {
    CaseSpec spec = affine(kAffine[kv_len / 2 % 2], kAffine[kv_len % 2], 32LL << (kv_len / 3 % 3), kDTypes[kv_len % 3],
                           1 + kv_len / 2 % 9, 1 + kv_len % 3);
    set_lengths(spec, kv_len);
    expect_oracle(spec);
  }
}

TEST_P(AffineTest, RowCountsAndMixedFormatsAgreeWithTheOracle) {
  for (const KvFormat k_format : {KvFormat::mlx_int8, KvFormat::mlx_int4, KvFormat::bf16, KvFormat::q4_0}) {
    for (const KvFormat v_format : {KvFormat::mlx_int8, KvFormat::mlx_int4, KvFormat::f16, KvFormat::q8_0}) {
      const bool is_affine = std::find(std::begin(kAffine), std::end(kAffine), k_format) != std::end(kAffine) ||
                             std::find(std::begin(kAffine), std::end(kAffine), v_format) != std::end(kAffine);
      for (const std::int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) {
        CaseSpec spec = affine(k_format, v_format, is_affine ? 64 : 0, is_affine ? DType::f16 : DType::f32, group, 1,
                               group % 2 == 0 ? 64 : 192);
        set_lengths(spec, 70);
        expect_oracle(spec);
      }
    }
  }
}

// V is one constant per sequence and KV head, whatever q and K are.
TEST_P(AffineTest, HeadsAndSequencesKeepTheirOwnScalesAndBiases) {
  for (const KvFormat format : kAffine) {
    for (const std::int64_t group : {1, 3, 8, 12}) {
      for (const bool token_major : {false, true}) {
        for (const std::int64_t row_gap : {0, 3}) {
          CaseSpec spec = affine(format, format, 64, DType::f32, group, 2);
          spec.k.token_major = spec.v.token_major = token_major;
          spec.k.row_gap = spec.v.row_gap = row_gap;
          spec.v_value = [](std::int64_t seq, std::int64_t head, std::int64_t, std::int64_t) {
            return static_cast<double>(seq * 32 + head + 1);
          };
          expect_exact(
              spec,
              [&spec, group](std::int64_t seq, std::int64_t head, std::int64_t row, std::int64_t) {
                const auto range = visible(spec, seq, row);
                return range.end > range.begin ? static_cast<double>(seq * 32 + head / group + 1) : 0.0;
              },
              Weights::any);
        }
      }
    }
  }
}

// Feature i of K is 1 at token i only, and head i asks for it: codes, scales or biases of other features would answer elsewhere.
TEST_P(AffineTest, FeaturesStayInOrder) {
  for (const KvFormat format : kAffine) {
    for (const std::int64_t dim : {64, 128, 256}) {
      for (const std::int64_t group : {1, 2, 4, 5, 8}) {
        CaseSpec spec = affine(format, format, 32, DType::f16, group, 1, dim);
        Problem& p = spec.problem;
        p.num_seqs = 1;
        p.num_kv_heads = 2;
        p.scale = 1.0F;
        p.max_kv_len = dim;
        spec.kv_lens = {static_cast<std::int32_t>(dim)};
        const auto wanted = [group, dim](std::int64_t head) {
          return (head % group * 37 + head / group * 11 + 5) % dim;
        };
        spec.q_value = [wanted](std::int64_t, std::int64_t head, std::int64_t, std::int64_t d) {
          return d == wanted(head) ? 1024.0 : 0.0;
        };
        spec.k_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
          return token == d ? 1.0 : 0.0;
        };
        spec.v_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
          return static_cast<double>(token % 8 + d % 8);
        };
        expect_exact(spec, [wanted](std::int64_t, std::int64_t head, std::int64_t, std::int64_t d) {
          return static_cast<double>(wanted(head) % 8 + d % 8);
        });
      }
    }
  }
}

TEST_P(AffineTest, StridesDoNotChangeABit) {
  for (const KvFormat format : kAffine) {
    for (const std::int64_t group : {1, 4, 7}) {
      CaseSpec spec = affine(format, format, 32, DType::bf16, group);
      const auto packed = result_bytes(spec);
      spec.k.token_major = true;
      spec.v.row_gap = 5;
      EXPECT_EQ(packed, result_bytes(spec)) << spec.name << " gaps";
      spec.k.row_gap = 1;
      spec.v.token_major = true;
      spec.k.spare_tokens = 11;
      EXPECT_EQ(packed, result_bytes(spec)) << spec.name << " token-major";
    }
  }
}

TEST_P(AffineTest, APrefixOfKIsV) {
  for (const KvFormat format : kAffine) {
    for (const std::int64_t group : {1, 5, 16}) {
      CaseSpec spec = affine(format, format, 64, DType::f16, group, 1, 192);
      spec.problem.head_dim_v = 128;
      spec.problem.v_is_k_prefix = true;
      expect_oracle(spec);
    }
  }
}

KVONCE_ON_EVERY_TARGET(AffineTest);

}  // namespace
}  // namespace kvonce::conformance
