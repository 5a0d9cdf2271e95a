// What stands outside the keys that a row sees must not change a bit of its result.
#include <cmath>
#include <limits>

#include "generator.hpp"
#include "target_test.hpp"

namespace kvonce::conformance {
namespace {

class PoisonTest : public TargetTest {
 protected:
  // Zero, NaN and the largest values outside the valid elements give the same bits.
  static void expect_poison_blind(CaseSpec spec) {
    spec.poison = Poison::zero;
    const auto zero = result_bytes(spec);
    spec.poison = Poison::nan;
    EXPECT_EQ(zero, result_bytes(spec)) << spec.name << " NaN";
    spec.poison = Poison::large;
    EXPECT_EQ(zero, result_bytes(spec)) << spec.name << " large";
  }
};

TEST_P(PoisonTest, OutsideTheLengths) {
  for (const KvFormat format : kPlainFormats) {
    for (const std::int64_t dim : {64, 128, 40, 1000}) {
      for (const std::int64_t q_len : {1, 3}) {
        CaseSpec spec = typical(q_len, format, dim);
        spec.kv_starts = {17, 0, 66};
        spec.k.spare_tokens = 9;
        spec.v.row_gap = 3;
        expect_poison_blind(spec);
      }
    }
  }
}

TEST_P(PoisonTest, OutsideTheLengthsOfBlocks) {
  for (const KvFormat k_format : {KvFormat::q8_0, KvFormat::q4_0, KvFormat::f16}) {
    for (const KvFormat v_format : {KvFormat::q8_0, KvFormat::q4_0}) {
      CaseSpec spec = typical(3, KvFormat::f16, 96);
      spec.problem.k_format = k_format;
      spec.problem.v_format = v_format;
      spec.kv_starts = {17, 0, 66};
      spec.k.spare_tokens = 9;
      spec.v.row_gap = 3;
      expect_poison_blind(spec);
    }
  }
}

// Codes, scales and biases alike.
TEST_P(PoisonTest, OutsideTheLengthsOfAffineFormats) {
  for (const KvFormat k_format : {KvFormat::mlx_int8, KvFormat::mlx_int4, KvFormat::q8_0}) {
    for (const KvFormat v_format : {KvFormat::mlx_int8, KvFormat::mlx_int4, KvFormat::bf16}) {
      for (const std::int64_t group : {32, 128}) {
        CaseSpec spec = typical(3, KvFormat::f16, 128);
        spec.problem.k_format = k_format;
        spec.problem.v_format = v_format;
        const bool is_affine = k_format != KvFormat::q8_0 || v_format != KvFormat::bf16;
        spec.problem.quant_group = is_affine ? group : 0;
        if (is_affine) spec.problem.scales_dtype = group == 32 ? DType::f32 : DType::bf16;
        spec.kv_starts = {17, 0, 66};
        spec.k.spare_tokens = 9;
        spec.v.row_gap = 3;
        expect_poison_blind(spec);
        spec.k.token_major = true;
        spec.k.row_gap = 2;
        expect_poison_blind(spec);
      }
    }
  }
}

TEST_P(PoisonTest, LeftOfTheWindow) {
  for (const std::int64_t window : {1, 127, 128, 129}) {
    for (const std::int64_t q_len : {1, 4}) {
      CaseSpec spec = typical(q_len, KvFormat::f16);
      spec.problem.window = window;
      expect_poison_blind(spec);
    }
  }
}

TEST_P(PoisonTest, PastEachChunkOfASplit) {
  for (const std::int64_t chunk : {1, 5, 13, 50}) {
    CaseSpec spec = typical(2, KvFormat::bf16, 72);
    spec.options.chunk_tokens = chunk;
    expect_poison_blind(spec);
  }
}

// One sequence is NaN throughout: it is NaN, the others keep their bits.
TEST_P(PoisonTest, AnotherSequencesNaN) {
  for (const KvFormat format : kPlainFormats) {
    CaseSpec spec = typical(2, format);
    spec.kv_lens = {197, 150, 66};
    const Plan plan = plan_case(spec, device());
    CaseTensors clean(spec);
    ASSERT_EQ(run_case(plan, spec, clean), "");
    CaseSpec poisoned = spec;
    const auto value = [&spec](std::uint64_t stream) {
      return [seed = spec.seed * 4 + stream](std::int64_t seq, std::int64_t head, std::int64_t token, std::int64_t d) {
        if (seq == 1) return std::numeric_limits<double>::quiet_NaN();
        return normal_value(seed, static_cast<std::uint64_t>(((seq * 2 + head) * 200 + token) * 64 + d));
      };
    };
    poisoned.k_value = value(1);
    poisoned.v_value = value(2);
    CaseTensors dirty(poisoned);
    ASSERT_EQ(run_case(plan, poisoned, dirty), "");
    CaseSpec alone = poisoned;
    alone.kv_lens[1] = 0;
    CaseTensors empty(alone);
    ASSERT_EQ(run_case(plan, alone, empty), "");
    for (const std::int64_t seq : {0, 2}) {
      for (std::int64_t head = 0; head < 10; ++head) {
        for (std::int64_t row = 0; row < 2; ++row) {
          for (std::int64_t d = 0; d < 64; ++d) {
            ASSERT_EQ(dirty.out_value(seq, head, row, d), empty.out_value(seq, head, row, d));
          }
        }
      }
    }
    EXPECT_TRUE(std::isnan(dirty.out_value(1, 0, 0, 0)));
    EXPECT_FALSE(std::isnan(clean.out_value(1, 0, 0, 0)));
  }
}

// The key of token j among the newest q_len is NaN: rows before it keep the bits they have with that key zero, rows at
// and after it see it.
TEST_P(PoisonTest, CausallyHiddenKeysOfTheNewestTokens) {
  for (const KvFormat format : kPlainFormats) {
    for (const std::int64_t q_len : {2, 3, 8, 16}) {
      for (const std::int64_t chunk : {0, 4}) {
        for (const bool in_v : {false, true}) {
          const std::int64_t hidden = q_len - 1;
          CaseSpec spec = typical(q_len, format, 64, 3, 2);
          spec.problem.num_seqs = 1;
          spec.kv_lens = {101};
          spec.options.chunk_tokens = chunk;
          double marked = 0.0;
          const auto value = [&](bool is_v) {
            return [&, is_v](std::int64_t, std::int64_t head, std::int64_t token, std::int64_t d) {
              if (token == 101 - q_len + hidden && is_v == in_v) return marked;
              return normal_value(is_v ? 8 : 7, static_cast<std::uint64_t>((head * 101 + token) * 64 + d));
            };
          };
          spec.k_value = value(false);
          spec.v_value = value(true);
          const Plan plan = plan_case(spec, device());
          CaseTensors zero(spec);
          ASSERT_EQ(run_case(plan, spec, zero), "");
          for (const double poison :
               {std::numeric_limits<double>::quiet_NaN(), 60000.0, std::numeric_limits<double>::infinity()}) {
            marked = poison;
            CaseTensors dirty(spec);
            ASSERT_EQ(run_case(plan, spec, dirty), "");
            for (std::int64_t head = 0; head < 6; ++head) {
              for (std::int64_t row = 0; row < hidden; ++row) {
                for (std::int64_t d = 0; d < 64; ++d) {
                  ASSERT_EQ(zero.out_value(0, head, row, d), dirty.out_value(0, head, row, d))
                      << spec.name << " row " << row << " of " << q_len << " poison " << poison << " in v " << in_v;
                }
                ASSERT_EQ(zero.lse_value(0, head, row), dirty.lse_value(0, head, row));
              }
              if (std::isnan(poison)) {
                EXPECT_TRUE(std::isnan(dirty.out_value(0, head, hidden, 0)));
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(PoisonTest, ADirtyWorkspaceChangesNothing) {
  for (const std::int64_t kv_len : {1, 2, 3, 197}) {
    CaseSpec spec = typical(2, KvFormat::f16, 128);
    spec.options.chunk_tokens = 3;  // up to 67 chunks, mostly empty for the short lengths
    spec.kv_lens = {static_cast<std::int32_t>(kv_len), 0, 3};
    const Plan plan = plan_case(spec, device());
    CaseTensors tensors(spec);
    ASSERT_EQ(run_case(plan, spec, tensors), "");
    const auto expected = tensors.result_bytes();
    std::vector<unsigned char> workspace(plan.workspace_bytes());
    for (const int dirt : {0x00, 0x7f, 0xff, 0x80}) {
      std::fill(workspace.begin(), workspace.end(), static_cast<unsigned char>(dirt));
      for (int repeat = 0; repeat < 3; ++repeat) {
        tensors.reset_outputs();
        attend(plan, tensors.inputs(), tensors.outputs(), workspace.data(), workspace.size());
        EXPECT_EQ(expected, tensors.result_bytes()) << "dirt " << dirt << " kv " << kv_len;
      }
    }
  }
}

KVONCE_ON_EVERY_TARGET(PoisonTest);

}  // namespace
}  // namespace kvonce::conformance
