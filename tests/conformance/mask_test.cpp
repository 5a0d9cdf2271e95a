// Array masks: what is hidden stays hidden, whatever is there, and costs no reads where whole steps are.
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "target_test.hpp"

namespace kvonce::conformance {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Kind {
  MaskKind mask;
  DType dtype;
};
constexpr Kind kKinds[] = {{MaskKind::boolean, DType::f32},
                           {MaskKind::additive, DType::f32},
                           {MaskKind::additive, DType::f16},
                           {MaskKind::additive, DType::bf16}};

class MaskTest : public TargetTest {
 protected:
  /// typical() with a mask that hides what hides(row, token) says and adds nothing.
  using Hides = std::function<bool(std::int64_t, std::int64_t)>;
  static CaseSpec masked(Kind kind, std::int64_t q_len, KvFormat format, const Hides& hides) {
    CaseSpec spec = typical(q_len, format, 64, 3, 2);
    spec.kv_lens = {197, 3, 150};
    spec.problem.mask = kind.mask;
    spec.problem.mask_dtype = kind.dtype;
    spec.problem.causal = false;
    const bool additive = kind.mask == MaskKind::additive;
    spec.mask_value = [additive, hides](std::int64_t, std::int64_t, std::int64_t row, std::int64_t token) {
      return hides(row, token) ? (additive ? -kInf : 0.0) : (additive ? 0.0 : 1.0);
    };
    spec.name += " " + std::string(to_string(kind.mask)) + " " + std::string(to_string(kind.dtype));
    return spec;
  }

  static void expect_empty(const CaseSpec& spec, std::int64_t row) {
    const Plan plan = plan_case(spec, device());
    CaseTensors tensors(spec);
    ASSERT_EQ(run_case(plan, spec, tensors), "");
    for (std::int64_t head = 0; head < spec.problem.num_q_heads; ++head) {
      ASSERT_EQ(tensors.lse_value(0, head, row), -kInf) << spec.name;
      for (std::int64_t d = 0; d < 64; ++d) ASSERT_EQ(tensors.out_value(0, head, row, d), 0.0) << spec.name;
    }
  }
};

// Single keys, runs inside a step and whole steps, hidden from every row: NaN there gives the bits that zeros give.
TEST_P(MaskTest, WhatEveryRowIsHiddenFromMayBeNaN) {
  const MaskTest::Hides patterns[] = {
      [](std::int64_t, std::int64_t token) { return token % 3 == 1; },
      [](std::int64_t, std::int64_t token) { return token >= 16 && token < 150; },
      [](std::int64_t, std::int64_t token) { return token < 100 || token == 130; },
      [](std::int64_t, std::int64_t) { return true; },
  };
  for (const Kind kind : kKinds) {
    for (const KvFormat format : kPlainFormats) {
      for (const std::int64_t q_len : {1, 3}) {
        for (const MaskTest::Hides& hides : patterns) {
          CaseSpec spec = masked(kind, q_len, format, hides);
          spec.options.policy.step_tokens = 32;
          double poison = 0.0;
          const auto value = [&](bool is_v) {
            return [&, is_v](std::int64_t, std::int64_t head, std::int64_t token, std::int64_t d) {
              if (hides(0, token)) return poison;
              return static_cast<double>((token * 7 + head * 3 + d * 5 + (is_v ? 1 : 0)) % 17 - 8) / 8;
            };
          };
          spec.k_value = value(false);
          spec.v_value = value(true);
          const auto zero = result_bytes(spec);
          for (const double bad : {kNaN, kInf, 60000.0}) {
            poison = bad;
            EXPECT_EQ(zero, result_bytes(spec)) << spec.name << " poison " << bad;
          }
        }
      }
    }
  }
}

// A key that some rows see is NaN: those rows are NaN, the others keep the bits that a zero key gives.
TEST_P(MaskTest, WhatOneRowIsHiddenFromDoesNotReachIt) {
  for (const Kind kind : kKinds) {
    for (const std::int64_t q_len : {2, 3, 8}) {
      for (const bool in_v : {false, true}) {
        const auto hides = [](std::int64_t row, std::int64_t token) { return (token + row) % 2 == 0; };
        CaseSpec spec = masked(kind, q_len, KvFormat::f16, hides);
        double marked = 0.0;
        const auto value = [&](bool is_v) {
          return [&, is_v](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
            return token == 96 && is_v == in_v ? marked : static_cast<double>((token * 7 + d * 5) % 17 - 8) / 8;
          };
        };
        spec.k_value = value(false);
        spec.v_value = value(true);
        const Plan plan = plan_case(spec, device());
        CaseTensors zero(spec);
        ASSERT_EQ(run_case(plan, spec, zero), "");
        marked = kNaN;
        CaseTensors dirty(spec);
        ASSERT_EQ(run_case(plan, spec, dirty), "");
        for (std::int64_t head = 0; head < 6; ++head) {
          for (std::int64_t row = 0; row < q_len; ++row) {
            for (std::int64_t d = 0; d < 64; ++d) {
              const double got = dirty.out_value(0, head, row, d);
              if (hides(row, 96)) {
                ASSERT_EQ(zero.out_value(0, head, row, d), got) << spec.name << " row " << row;
              } else {
                ASSERT_TRUE(std::isnan(got)) << spec.name << " row " << row;
              }
            }
          }
        }
      }
    }
  }
}

// The two ways to write a row without keys, next to rows that have some.
TEST_P(MaskTest, ARowThatSeesNothingIsZeroAndMinusInfinity) {
  for (const Kind kind : kKinds) {
    for (const std::int64_t chunk : {0, 7}) {
      CaseSpec spec =
          masked(kind, 3, KvFormat::f16, [](std::int64_t row, std::int64_t token) { return row == 1 || token == 5; });
      spec.options.chunk_tokens = chunk;
      expect_empty(spec, 1);
      expect_oracle(spec);
    }
  }
}

// Large negative entries are no -inf: alone they cancel, next to 0 their keys weigh nothing. The most negative float
// overflows in base 2 and then counts as weight 0 throughout, as docs/numerics.md says.
TEST_P(MaskTest, LargeNegativeEntriesAreFinite) {
  for (const double entry : {-1e4, -6e4, -1e30, -1e38}) {
    CaseSpec spec = masked({MaskKind::additive, DType::f32}, 2, KvFormat::f32, {});
    spec.q_value = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return 0.0; };
    spec.mask_value = [entry](std::int64_t, std::int64_t, std::int64_t row, std::int64_t token) {
      return row == 0 || token % 2 == 0 ? entry : 0.0;
    };
    expect_oracle(spec);
  }
  CaseSpec spec = masked({MaskKind::additive, DType::f32}, 2, KvFormat::f32, {});
  spec.mask_value = [](std::int64_t, std::int64_t, std::int64_t row, std::int64_t) {
    return row == 0 ? -3.4028234e38 : 0.0;
  };
  expect_empty(spec, 0);
}

TEST_P(MaskTest, ANaNEntryMakesItsRowNaN) {
  CaseSpec spec = masked({MaskKind::additive, DType::f16}, 2, KvFormat::f32, {});
  spec.mask_value = [](std::int64_t, std::int64_t, std::int64_t row, std::int64_t token) {
    return row == 0 && token == 40 ? kNaN : 0.0;
  };
  const Plan plan = plan_case(spec, device());
  CaseTensors tensors(spec);
  ASSERT_EQ(run_case(plan, spec, tensors), "");
  EXPECT_TRUE(std::isnan(tensors.out_value(0, 0, 0, 0)));
  EXPECT_TRUE(std::isnan(tensors.lse_value(0, 0, 0)));
  EXPECT_FALSE(std::isnan(tensors.out_value(0, 0, 1, 0)));
}

// Every broadcast against the mask written out, bit by bit.
TEST_P(MaskTest, BroadcastAxesMatchTheMaterialisedMask) {
  for (const Kind kind : kKinds) {
    for (int axes = 1; axes < 8; ++axes) {
      const auto hides = [axes](std::int64_t row, std::int64_t token) {
        return (token * 5 + ((axes & 4) != 0 ? 0 : row)) % 4 == 0;
      };
      CaseSpec written_out = masked(kind, 4, KvFormat::f16, hides);
      CaseSpec broadcast = written_out;
      broadcast.mask = {(axes & 1) != 0, (axes & 2) != 0, (axes & 4) != 0, axes % 3};
      EXPECT_EQ(result_bytes(written_out), result_bytes(broadcast)) << written_out.name << " axes " << axes;
      expect_oracle(broadcast);
    }
  }
}

// A sliding window as an additive mask: most chunks are hidden from every row.
TEST_P(MaskTest, AWindowMayComeAsAMask) {
  for (const std::int64_t window : {1, 17, 128}) {
    CaseSpec spec = masked({MaskKind::additive, DType::f16}, 3, KvFormat::f16,
                           [window](std::int64_t row, std::int64_t token) { return token <= 194 + row - window; });
    spec.problem.max_kv_len = 197;
    spec.problem.causal = true;
    spec.options.chunk_tokens = 16;
    expect_oracle(spec);
  }
}

// Mask offsets beyond 2^31 elements, in address space without memory behind it.
TEST_P(MaskTest, OffsetsBeyond32Bits) {
  const std::int64_t stride = (1LL << 31) + 64;
  const std::size_t bytes = static_cast<std::size_t>(2 * stride);
  void* const space = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(space, MAP_FAILED);
  auto* const entries = static_cast<std::uint8_t*>(space);
  for (int axis = 0; axis < 3; ++axis) {
    Problem p;
    p.num_seqs = axis == 0 ? 2 : 1;
    p.num_kv_heads = 1;
    p.num_q_heads = axis == 1 ? 2 : 1;
    p.q_len = axis == 2 ? 2 : 1;
    p.head_dim_qk = 64;
    p.max_kv_len = 20;
    p.causal = false;
    p.mask = MaskKind::boolean;
    for (std::int64_t i = 0; i < 2; ++i) {
      for (std::int64_t key = 0; key < 20; ++key) entries[i * stride + key] = key % 4 == i ? 1 : 0;
    }
    const std::vector<float> q(128, 0.0F);
    std::vector<float> kv(2 * 20 * 64);
    for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<float>(i / 64 % 20);
    std::vector<float> out(128, -1.0F);
    Inputs inputs;
    inputs.q = {q.data(), 64, 64, 64};
    inputs.k = inputs.v = {kv.data(), 20 * 64, 20 * 64, 64};
    inputs.mask = entries;
    (axis == 0 ? inputs.mask_seq_stride : axis == 1 ? inputs.mask_head_stride : inputs.mask_row_stride) = stride;
    Outputs outputs;
    outputs.out = out.data();
    outputs.out_seq_stride = outputs.out_head_stride = outputs.out_token_stride = 64;
    const Plan plan = make_plan(p, device());
    std::vector<unsigned char> workspace(plan.workspace_bytes());
    attend(plan, inputs, outputs, workspace.data(), workspace.size());
    EXPECT_NEAR(out[0], 8.0F, 1e-5) << "axis " << axis;   // keys 0 4 8 12 16
    EXPECT_NEAR(out[64], 9.0F, 1e-5) << "axis " << axis;  // keys 1 5 9 13 17
  }
  munmap(space, bytes);
}

KVONCE_ON_EVERY_TARGET(MaskTest);

}  // namespace
}  // namespace kvonce::conformance
