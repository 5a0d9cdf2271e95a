#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kvonce/attend.hpp"

namespace kvonce {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::size_t idx(std::int64_t i) { return static_cast<std::size_t>(i); }

// Partials of num_rows rows, packed [part][row][dim] and [part][row].
struct Parts {
  Parts(std::int64_t parts, std::int64_t rows, std::int64_t dims)
      : num_parts(parts), num_rows(rows), head_dim_v(dims), o(idx(parts * rows * dims)), lse(idx(parts * rows)) {}

  float& o_at(std::int64_t part, std::int64_t row, std::int64_t dim) {
    return o[idx((part * num_rows + row) * head_dim_v + dim)];
  }
  float& lse_at(std::int64_t part, std::int64_t row) { return lse[idx(part * num_rows + row)]; }

  void set(std::int64_t part, std::int64_t row, float lse_value, float o_value) {
    lse_at(part, row) = lse_value;
    for (std::int64_t dim = 0; dim < head_dim_v; ++dim) o_at(part, row, dim) = o_value;
  }

  [[nodiscard]] MergeInputs inputs() const {
    MergeInputs in;
    in.o = o.data();
    in.lse = lse.data();
    in.num_parts = num_parts;
    in.num_rows = num_rows;
    in.head_dim_v = head_dim_v;
    in.o_part_stride = num_rows * head_dim_v;
    in.o_row_stride = head_dim_v;
    in.lse_part_stride = num_rows;
    return in;
  }

  std::int64_t num_parts;
  std::int64_t num_rows;
  std::int64_t head_dim_v;
  std::vector<float> o;
  std::vector<float> lse;
};

struct Merged {
  std::vector<float> o;
  std::vector<float> lse;
};

// Outputs start as NaN: a row that merge does not write fails every comparison.
Merged run_merge(const Parts& parts) {
  Merged merged{std::vector<float>(idx(parts.num_rows * parts.head_dim_v), kNaN),
                std::vector<float>(idx(parts.num_rows), kNaN)};
  merge(parts.inputs(), merged.o.data(), parts.head_dim_v, merged.lse.data());
  return merged;
}

Parts random_parts(std::int64_t num_parts, std::int64_t rows, std::int64_t dims, double share_empty, unsigned seed) {
  Parts parts(num_parts, rows, dims);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (float& x : parts.o) x = normal(random);
  for (float& x : parts.lse) x = 6.0F * normal(random);
  for (std::int64_t part = 0; part < num_parts; ++part) {
    for (std::int64_t row = 0; row < rows; ++row) {
      if (uniform(random) < share_empty) parts.set(part, row, -kInf, 0.0F);
    }
  }
  return parts;
}

// The definition, in double.
void expect_matches_definition(const Parts& given, const Merged& merged) {
  Parts parts = given;
  for (std::int64_t row = 0; row < parts.num_rows; ++row) {
    double sum = 0.0;
    double max_lse = -kInf;
    for (std::int64_t part = 0; part < parts.num_parts; ++part) {
      max_lse = std::max(max_lse, static_cast<double>(parts.lse_at(part, row)));
    }
    const bool empty = max_lse == -kInf;
    for (std::int64_t part = 0; part < parts.num_parts && !empty; ++part)
      sum += std::exp(parts.lse_at(part, row) - max_lse);
    const double lse = empty ? -kInf : max_lse + std::log(sum);
    if (empty) {
      EXPECT_EQ(merged.lse[idx(row)], -kInf) << "row " << row;
    } else {
      EXPECT_NEAR(merged.lse[idx(row)], lse, 1e-5 + 1e-7 * std::abs(lse)) << "row " << row;
    }
    for (std::int64_t dim = 0; dim < parts.head_dim_v; ++dim) {
      double expected = 0.0;
      for (std::int64_t part = 0; part < parts.num_parts && !empty; ++part) {
        expected += std::exp(parts.lse_at(part, row) - lse) * parts.o_at(part, row, dim);
      }
      ASSERT_NEAR(merged.o[idx(row * parts.head_dim_v + dim)], expected, 2e-5) << "row " << row << " dim " << dim;
    }
  }
}

bool same_bits(const float* a, const float* b, std::int64_t count) {
  return std::equal(a, a + count, b, [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), static_cast<std::int64_t>(a.size()));
}

TEST(MergeTest, MatchesTheDefinitionForManyPartsAndDimsWithHalfThePartsEmpty) {
  for (const std::int64_t parts : {1, 2, 3, 5, 17, 32, 55, 97, 133}) {
    for (const std::int64_t dims : {1, 3, 63, 64, 65, 128, 200, 512}) {
      SCOPED_TRACE(testing::Message() << parts << " parts, " << dims << " dims");
      const Parts given = random_parts(parts, 4, dims, 0.5, static_cast<unsigned>(parts * 1000 + dims));
      expect_matches_definition(given, run_merge(given));
    }
  }
}

TEST(MergeTest, OnePartIsReturnedAsItIs) {
  const Parts given = random_parts(1, 7, 70, 0.3, 1);
  const Merged merged = run_merge(given);
  EXPECT_TRUE(same_bits(merged.o, given.o));
  for (std::size_t row = 0; row < merged.lse.size(); ++row) EXPECT_EQ(merged.lse[row], given.lse[row]);
}

TEST(MergeTest, AnEmptyPartIsNeutralOnEitherSide) {
  const Parts one = random_parts(1, 5, 33, 0.0, 2);
  for (const std::int64_t position : {0, 1, 2}) {
    Parts padded(3, 5, 33);
    for (std::int64_t row = 0; row < 5; ++row) {
      for (std::int64_t part = 0; part < 3; ++part) padded.set(part, row, -kInf, 0.0F);
      padded.lse_at(position, row) = one.lse[idx(row)];
      for (std::int64_t dim = 0; dim < 33; ++dim) padded.o_at(position, row, dim) = one.o[idx(row * 33 + dim)];
    }
    const Merged merged = run_merge(padded);
    EXPECT_TRUE(same_bits(merged.o, one.o)) << "position " << position;
    EXPECT_TRUE(same_bits(merged.lse, one.lse)) << "position " << position;
  }
}

TEST(MergeTest, OnlyEmptyPartsGiveAnEmptyPart) {
  for (const std::int64_t num_parts : {1, 2, 9}) {
    Parts parts(num_parts, 2, 65);
    for (std::int64_t part = 0; part < num_parts; ++part) {
      for (std::int64_t row = 0; row < 2; ++row) parts.set(part, row, -kInf, 0.0F);
    }
    const Merged merged = run_merge(parts);
    for (const float x : merged.o) EXPECT_EQ(x, 0.0F);
    for (const float x : merged.lse) EXPECT_EQ(x, -kInf);
  }
}

TEST(MergeTest, WhatAnEmptyPartHoldsDoesNotMatter) {
  Parts parts(2, 1, 4);
  parts.set(0, 0, 1.5F, 3.0F);
  for (const float rubbish : {kNaN, kInf, 1e30F}) {
    parts.set(1, 0, -kInf, rubbish);
    const Merged merged = run_merge(parts);
    for (const float x : merged.o) EXPECT_EQ(x, 3.0F);
    EXPECT_EQ(merged.lse[0], 1.5F);
  }
}

TEST(MergeTest, EqualPartsKeepTheOutputAndAddLogOfTheirNumber) {
  for (const std::int64_t num_parts : {2, 4, 8}) {
    Parts parts(num_parts, 1, 3);
    for (std::int64_t part = 0; part < num_parts; ++part) parts.set(part, 0, -2.0F, 5.0F);
    const Merged merged = run_merge(parts);
    for (const float x : merged.o) EXPECT_EQ(x, 5.0F);
    EXPECT_NEAR(merged.lse[0], -2.0 + std::log(static_cast<double>(num_parts)), 1e-6);
  }
}

TEST(MergeTest, WeightsFollowFromTheLseOfEachPart) {
  Parts parts(2, 1, 1);
  parts.set(0, 0, std::log(1.0F), 10.0F);
  parts.set(1, 0, std::log(3.0F), 20.0F);
  const Merged merged = run_merge(parts);
  EXPECT_NEAR(merged.o[0], 17.5, 1e-5);
  EXPECT_NEAR(merged.lse[0], std::log(4.0), 1e-6);
}

TEST(MergeTest, OrderAndGroupingOfPartsMatterOnlyInTheLastBits) {
  const Parts all = random_parts(3, 6, 40, 0.2, 3);
  const Merged whole = run_merge(all);
  for (const bool reversed : {false, true}) {
    const auto part_of = [&](std::int64_t i) { return reversed ? 2 - i : i; };
    Parts pair(2, 6, 40);
    const auto copy = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t row = 0; row < 6; ++row) {
        pair.lse_at(to, row) = Parts(all).lse_at(from, row);
        for (std::int64_t dim = 0; dim < 40; ++dim) pair.o_at(to, row, dim) = all.o[idx((from * 6 + row) * 40 + dim)];
      }
    };
    copy(part_of(0), 0);
    copy(part_of(1), 1);
    const Merged first = run_merge(pair);
    std::copy(first.o.begin(), first.o.end(), pair.o.begin());
    std::copy(first.lse.begin(), first.lse.end(), pair.lse.begin());
    copy(part_of(2), 1);
    const Merged grouped = run_merge(pair);
    for (std::size_t i = 0; i < whole.o.size(); ++i) ASSERT_NEAR(grouped.o[i], whole.o[i], 4e-6);
    for (std::size_t i = 0; i < whole.lse.size(); ++i) {
      if (whole.lse[i] == -kInf) {
        EXPECT_EQ(grouped.lse[i], -kInf);
      } else {
        EXPECT_NEAR(grouped.lse[i], whole.lse[i], 4e-6);
      }
    }
  }
}

TEST(MergeTest, RepeatedCallsGiveTheSameBits) {
  const Parts given = random_parts(33, 9, 130, 0.3, 4);
  const Merged first = run_merge(given);
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Merged again = run_merge(given);
    ASSERT_TRUE(same_bits(first.o, again.o));
    ASSERT_TRUE(same_bits(first.lse, again.lse));
  }
}

TEST(MergeTest, ARowDoesNotDependOnTheRowsBesideIt) {
  const Parts given = random_parts(5, 8, 100, 0.3, 5);
  const Merged together = run_merge(given);
  for (std::int64_t row = 0; row < 8; ++row) {
    MergeInputs in = given.inputs();
    in.o += row * in.o_row_stride;
    in.lse += row;
    in.num_rows = 1;
    std::vector<float> o(100, kNaN);
    float lse = kNaN;
    merge(in, o.data(), 100, &lse);
    EXPECT_TRUE(same_bits(o.data(), together.o.data() + row * 100, 100)) << "row " << row;
    EXPECT_EQ(lse, together.lse[idx(row)]);
  }
}

TEST(MergeTest, OutMayBeOneOfTheParts) {
  const Parts given = random_parts(4, 5, 150, 0.2, 6);
  const Merged expected = run_merge(given);
  for (std::int64_t target = 0; target < 4; ++target) {
    Parts parts = given;
    std::vector<float> lse(5, kNaN);
    merge(parts.inputs(), parts.o.data() + target * 5 * 150, 150, lse.data());
    EXPECT_TRUE(same_bits(parts.o.data() + target * 5 * 150, expected.o.data(), 5 * 150)) << "part " << target;
    EXPECT_TRUE(same_bits(lse, expected.lse));
  }
}

TEST(MergeTest, AnyStridesReadTheSameValuesAndNothingElseIsWritten) {
  const Parts given = random_parts(3, 4, 70, 0.2, 7);
  const Merged expected = run_merge(given);
  // Rows outermost, gaps of NaN between everything.
  const std::int64_t o_part_stride = 75;
  const std::int64_t o_row_stride = 3 * o_part_stride + 11;
  const std::int64_t lse_row_stride = 7;
  std::vector<float> o(idx(4 * o_row_stride), kNaN);
  std::vector<float> lse(idx(4 * lse_row_stride), kNaN);
  for (std::int64_t part = 0; part < 3; ++part) {
    for (std::int64_t row = 0; row < 4; ++row) {
      lse[idx(row * lse_row_stride + 2 * part)] = Parts(given).lse_at(part, row);
      std::memcpy(&o[idx(row * o_row_stride + part * o_part_stride)], &given.o[idx((part * 4 + row) * 70)], 70 * 4);
    }
  }
  MergeInputs in;
  in.o = o.data();
  in.lse = lse.data();
  in.num_parts = 3;
  in.num_rows = 4;
  in.head_dim_v = 70;
  in.o_part_stride = o_part_stride;
  in.o_row_stride = o_row_stride;
  in.lse_part_stride = 2;
  in.lse_row_stride = lse_row_stride;
  constexpr float kGuard = 12345.0F;
  std::vector<float> out(4 * 80, kGuard);
  std::vector<float> out_lse(5, kGuard);
  merge(in, out.data(), 80, out_lse.data());
  for (std::int64_t row = 0; row < 4; ++row) {
    EXPECT_TRUE(same_bits(&out[idx(row * 80)], &expected.o[idx(row * 70)], 70)) << "row " << row;
    for (std::int64_t dim = 70; dim < 80; ++dim) EXPECT_EQ(out[idx(row * 80 + dim)], kGuard);
    EXPECT_EQ(out_lse[idx(row)], expected.lse[idx(row)]);
  }
  EXPECT_EQ(out_lse[4], kGuard);
}

TEST(MergeTest, LseIsOptional) {
  const Parts given = random_parts(3, 2, 10, 0.0, 8);
  std::vector<float> o(20, kNaN);
  merge(given.inputs(), o.data(), 10, nullptr);
  EXPECT_TRUE(same_bits(o, run_merge(given).o));
}

TEST(MergeTest, APartThatCarriesOnlyASinkAddsToTheDenominator) {
  Parts parts(2, 1, 2);
  parts.set(0, 0, std::log(3.0F), 8.0F);
  parts.set(1, 0, std::log(1.0F), 0.0F);
  const Merged merged = run_merge(parts);
  EXPECT_NEAR(merged.o[0], 6.0, 1e-5);
  EXPECT_NEAR(merged.lse[0], std::log(4.0), 1e-6);
}

TEST(MergeTest, LargeFiniteLseStayFinite) {
  for (const float lse : {88.0F, -104.0F, 1e4F, -1e4F, 1e30F, -1e30F, 3e38F, -3e38F}) {
    Parts parts(2, 1, 1);
    parts.set(0, 0, lse, 4.0F);
    parts.set(1, 0, lse, 8.0F);
    const Merged merged = run_merge(parts);
    EXPECT_EQ(merged.o[0], 6.0F) << lse;
    EXPECT_NEAR(merged.lse[0], lse + std::log(2.0), 1e-6 * std::abs(lse)) << lse;
    parts.set(1, 0, 0.0F, 8.0F);
    const Merged far = run_merge(parts);
    if (std::abs(lse) > 200.0F) {
      EXPECT_EQ(far.o[0], lse > 0 ? 4.0F : 8.0F) << lse;
    }
    EXPECT_EQ(far.lse[0], std::max(lse, 0.0F)) << lse;
  }
}

TEST(MergeTest, NaNOrPositiveInfinityNeverLooksLikeAnEmptyPart) {
  for (const float bad : {kNaN, kInf}) {
    for (const std::int64_t position : {0, 1, 2}) {
      Parts parts(3, 2, 3);
      for (std::int64_t part = 0; part < 3; ++part) {
        for (std::int64_t row = 0; row < 2; ++row) parts.set(part, row, 1.0F, 2.0F);
      }
      parts.lse_at(position, 0) = bad;
      const Merged merged = run_merge(parts);
      EXPECT_TRUE(std::isnan(merged.lse[0])) << bad << " at " << position;
      for (int dim = 0; dim < 3; ++dim) EXPECT_TRUE(std::isnan(merged.o[idx(dim)]));
      EXPECT_EQ(merged.o[3], 2.0F) << "the other row is not affected";
    }
  }
}

TEST(MergeTest, NoRowsIsNoWork) {
  MergeInputs in;
  in.num_parts = 2;
  in.head_dim_v = 4;
  EXPECT_NO_THROW(merge(in, nullptr, 0, nullptr));
}

TEST(MergeTest, ImpossibleArgumentsAreRefusedByName) {
  const Parts given = random_parts(2, 3, 4, 0.0, 9);
  std::vector<float> out(12);
  struct Case {
    const char* name;
    void (*spoil)(MergeInputs&);
  };
  const Case cases[] = {
      {"num_parts: got 0", [](MergeInputs& in) { in.num_parts = 0; }},
      {"num_parts: got -1", [](MergeInputs& in) { in.num_parts = -1; }},
      {"num_rows: got -1", [](MergeInputs& in) { in.num_rows = -1; }},
      {"head_dim_v: got 0", [](MergeInputs& in) { in.head_dim_v = 0; }},
      {"o: got null", [](MergeInputs& in) { in.o = nullptr; }},
      {"lse: got null", [](MergeInputs& in) { in.lse = nullptr; }},
  };
  const auto refused = [](const MergeInputs& in, float* to, const std::string& start) {
    try {
      merge(in, to, 4, nullptr);
      ADD_FAILURE() << start << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_EQ(std::string(error.what()).rfind(start, 0), 0U) << error.what();
    }
  };
  for (const Case& c : cases) {
    MergeInputs in = given.inputs();
    c.spoil(in);
    refused(in, out.data(), c.name);
  }
  refused(given.inputs(), nullptr, "out: got null");
}

}  // namespace
}  // namespace kvonce
