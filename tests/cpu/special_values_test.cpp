// NaN, infinities and overflow in what a row does see, on every target: docs/numerics.md, section 6.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "kvonce/kvonce.hpp"

namespace kvonce {

// How a device reads in a test's name.
static void PrintTo(const Device& device, std::ostream* out) { *out << device.target; }
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kDim = 64;

// One KV head, all scores equal and all values 1 until a test changes an element.
struct Attention {
  Attention(std::int64_t tokens, std::int64_t rows)
      : num_tokens(tokens), num_rows(rows), q(size(rows), 0.125F), k(size(tokens), 0.25F), v(size(tokens), 1.0F) {}

  static std::size_t size(std::int64_t rows) { return static_cast<std::size_t>(rows * kDim); }
  static float& at(std::vector<float>& values, std::int64_t row, std::int64_t dim) {
    return values[static_cast<std::size_t>(row * kDim + dim)];
  }

  void run(const Device& device) {
    Problem p;
    p.num_q_heads = num_rows;
    p.num_kv_heads = 1;
    p.head_dim_qk = kDim;
    p.max_kv_len = num_tokens;
    p.scale = 1.0F;
    PlanOptions options;
    options.chunk_tokens = 32;  // several chunks, so that the merge takes part
    const Plan plan = make_plan(p, device, options);
    out.assign(q.size(), -7.0F);
    lse.assign(static_cast<std::size_t>(num_rows), -7.0F);
    std::vector<char> workspace(plan.workspace_bytes());
    Inputs inputs;
    inputs.q = {q.data(), 0, kDim, kDim};
    inputs.k = {k.data(), 0, 0, kDim};
    inputs.v = {v.data(), 0, 0, kDim};
    Outputs outputs;
    outputs.out = out.data();
    outputs.out_head_stride = kDim;
    outputs.lse = lse.data();
    outputs.lse_head_stride = 1;
    attend(plan, inputs, outputs, workspace.data(), workspace.size());
  }

  void expect_row_nan(std::int64_t row) const {
    EXPECT_TRUE(std::isnan(lse[static_cast<std::size_t>(row)])) << "row " << row;
    for (std::int64_t dim = 0; dim < kDim; ++dim) {
      ASSERT_TRUE(std::isnan(out[static_cast<std::size_t>(row * kDim + dim)])) << "row " << row << " dim " << dim;
    }
  }

  /// All values are 1 except in dim `except`, so every weighted mean is 1.
  void expect_row_of_ones(std::int64_t row, std::int64_t except = -1) const {
    EXPECT_TRUE(std::isfinite(lse[static_cast<std::size_t>(row)])) << "row " << row;
    for (std::int64_t dim = 0; dim < kDim; ++dim) {
      if (dim == except) continue;
      ASSERT_NEAR(out[static_cast<std::size_t>(row * kDim + dim)], 1.0F, 1e-6F) << "row " << row << " dim " << dim;
    }
  }

  std::int64_t num_tokens;
  std::int64_t num_rows;
  std::vector<float> q;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<float> out;
  std::vector<float> lse;
};

std::vector<Device> cpu_targets() {
  std::vector<Device> found;
  for (const Device& device : devices()) {
    if (device.backend == Backend::cpu) found.push_back(device);
  }
  return found;
}

class SpecialValuesTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (!GetParam().unavailable.empty()) GTEST_SKIP() << "not run: " << GetParam().unavailable;
  }

  template <class Body>
  static void for_each_shape(Body body) {
    for (const std::int64_t tokens : {1, 5, 33, 200}) {
      for (const std::int64_t rows : {1, 5, 8}) {
        SCOPED_TRACE(testing::Message() << tokens << " tokens, " << rows << " rows");
        Attention attention(tokens, rows);
        body(attention, tokens / 2);
      }
    }
  }
};

TEST_P(SpecialValuesTest, NaNInAVisibleKeyMakesEveryRowNaN) {
  for_each_shape([](Attention& a, std::int64_t token) {
    Attention::at(a.k, token, 3) = kNaN;
    a.run(GetParam());
    for (std::int64_t row = 0; row < a.num_rows; ++row) a.expect_row_nan(row);
  });
}

TEST_P(SpecialValuesTest, NaNInAQueryMakesItsRowNaNAndNoOther) {
  for_each_shape([](Attention& a, std::int64_t) {
    Attention::at(a.q, 0, 3) = kNaN;
    a.run(GetParam());
    a.expect_row_nan(0);
    for (std::int64_t row = 1; row < a.num_rows; ++row) a.expect_row_of_ones(row);
  });
}

TEST_P(SpecialValuesTest, NaNOrInfinityInAVisibleValueStaysInItsDimension) {
  for (const float bad : {kNaN, kInf, -kInf}) {
    for_each_shape([bad](Attention& a, std::int64_t token) {
      Attention::at(a.v, token, 3) = bad;
      a.run(GetParam());
      for (std::int64_t row = 0; row < a.num_rows; ++row) {
        a.expect_row_of_ones(row, 3);
        const float got = Attention::at(a.out, row, 3);
        EXPECT_TRUE(std::isnan(bad) ? std::isnan(got) : got == bad) << got << " for " << bad;
      }
    });
  }
}

TEST_P(SpecialValuesTest, AnInfiniteValueUnderAVanishingWeightGivesNaN) {
  for_each_shape([](Attention& a, std::int64_t token) {
    if (a.num_tokens == 1) return;
    for (std::int64_t row = 0; row < a.num_rows; ++row) Attention::at(a.q, row, 0) = 100.0F;
    Attention::at(a.k, token, 0) = -100.0F;  // exp(-1e4) is 0 in float32
    Attention::at(a.v, token, 3) = kInf;
    a.run(GetParam());
    for (std::int64_t row = 0; row < a.num_rows; ++row) {
      a.expect_row_of_ones(row, 3);
      EXPECT_TRUE(std::isnan(Attention::at(a.out, row, 3)));
    }
  });
}

TEST_P(SpecialValuesTest, AScoreThatOverflowsUpwardsMakesItsRowNaNAndNoOther) {
  for_each_shape([](Attention& a, std::int64_t token) {
    Attention::at(a.q, 0, 0) = 1e5F;
    Attention::at(a.k, token, 0) = 3e38F;
    a.run(GetParam());
    a.expect_row_nan(0);
    for (std::int64_t row = 1; row < a.num_rows; ++row) a.expect_row_of_ones(row);
  });
}

TEST_P(SpecialValuesTest, ScoresThatOverflowDownwardsCountAsNothing) {
  for_each_shape([](Attention& a, std::int64_t token) {
    for (std::int64_t row = 0; row < a.num_rows; ++row) Attention::at(a.q, row, 0) = 1e5F;
    Attention::at(a.k, token, 0) = -3e38F;
    if (a.num_tokens > 1) {
      a.run(GetParam());
      for (std::int64_t row = 0; row < a.num_rows; ++row) a.expect_row_of_ones(row);
    }
    for (std::int64_t t = 0; t < a.num_tokens; ++t) Attention::at(a.k, t, 0) = -3e38F;
    a.run(GetParam());
    for (const float x : a.out) ASSERT_EQ(x, 0.0F);
    for (const float x : a.lse) ASSERT_EQ(x, -kInf);
  });
}

INSTANTIATE_TEST_SUITE_P(Cpu, SpecialValuesTest, testing::ValuesIn(cpu_targets()),
                         [](const testing::TestParamInfo<Device>& param) { return param.param.target; });

}  // namespace
}  // namespace kvonce
