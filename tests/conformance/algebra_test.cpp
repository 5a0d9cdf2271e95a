// Identities of attention that hold for any implementation: merge, duplication, permutation, convexity, linearity.
#include <algorithm>
#include <cmath>
#include <limits>

#include "generator.hpp"
#include "target_test.hpp"

namespace kvonce::conformance {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

class AlgebraTest : public TargetTest {
 protected:
  static ValueFn noise(std::uint64_t seed) {
    return [seed](std::int64_t seq, std::int64_t head, std::int64_t token, std::int64_t d) {
      return normal_value(seed, static_cast<std::uint64_t>(((seq * 64 + head) * 1024 + token) * 64 + d));
    };
  }

  // K and V where token t is token map(t) of the noise.
  static void set_tokens(CaseSpec& spec, const std::function<std::int64_t(std::int64_t)>& map) {
    const auto mapped = [map](const ValueFn& fn) {
      return [map, fn](std::int64_t seq, std::int64_t head, std::int64_t token, std::int64_t d) {
        return fn(seq, head, map(token), d);
      };
    };
    spec.k_value = mapped(noise(21));
    spec.v_value = mapped(noise(22));
  }

  static CaseSpec one_sequence(std::int32_t kv_len) {
    CaseSpec spec = typical(1, KvFormat::f32, 64, 3, 2);
    spec.problem.num_seqs = 1;
    spec.problem.causal = false;
    spec.problem.max_kv_len = kv_len;
    spec.kv_lens = {kv_len};
    spec.q_value = noise(20);
    set_tokens(spec, [](std::int64_t token) { return token; });
    return spec;
  }

  struct Rows {
    std::vector<float> o, lse;
  };
  static Rows run_rows(const CaseSpec& spec) {
    CaseTensors tensors(spec);
    EXPECT_EQ(run_case(plan_case(spec, device()), spec, tensors), "");
    Rows rows;
    for (std::int64_t head = 0; head < spec.problem.num_q_heads; ++head) {
      rows.lse.push_back(static_cast<float>(tensors.lse_value(0, head, 0)));
      for (std::int64_t d = 0; d < 64; ++d) rows.o.push_back(static_cast<float>(tensors.out_value(0, head, 0, d)));
    }
    return rows;
  }
  static void expect_near(const std::vector<float>& got, const std::vector<float>& want, float tolerance) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
  }
};

// V12: shards of one cache, merged in any order, are the whole.
TEST_P(AlgebraTest, MergedShardsAreTheWhole) {
  const Rows whole = run_rows(one_sequence(300));
  const std::pair<std::int64_t, std::int64_t> shards[] = {{0, 1}, {1, 128}, {128, 128}, {128, 299}, {299, 300}};
  Rows parts;
  for (const auto& [begin, end] : shards) {
    CaseSpec spec = one_sequence(static_cast<std::int32_t>(end - begin));
    set_tokens(spec, [first = begin](std::int64_t token) { return first + token; });
    const Rows part = run_rows(spec);
    parts.o.insert(parts.o.end(), part.o.begin(), part.o.end());
    parts.lse.insert(parts.lse.end(), part.lse.begin(), part.lse.end());
  }
  const std::int64_t rows = 6;
  MergeInputs inputs;
  inputs.head_dim_v = 64;
  inputs.num_rows = rows;
  inputs.num_parts = 5;
  inputs.o_row_stride = 64;
  inputs.lse_row_stride = 1;
  for (const bool backwards : {false, true}) {
    const std::int64_t direction = backwards ? -1 : 1;
    inputs.o = parts.o.data() + (backwards ? 4 * rows * 64 : 0);
    inputs.lse = parts.lse.data() + (backwards ? 4 * rows : 0);
    inputs.o_part_stride = direction * rows * 64;
    inputs.lse_part_stride = direction * rows;
    Rows merged{std::vector<float>(whole.o.size()), std::vector<float>(whole.lse.size())};
    merge(inputs, merged.o.data(), 64, merged.lse.data());
    expect_near(merged.o, whole.o, 1e-6F);
    expect_near(merged.lse, whole.lse, 2e-6F);
  }
}

TEST_P(AlgebraTest, EveryKeyTwiceAddsLn2ToTheLse) {
  for (const std::int64_t chunk : {0, 7, 64}) {
    CaseSpec once = one_sequence(150);
    CaseSpec twice = one_sequence(300);
    once.options.chunk_tokens = twice.options.chunk_tokens = chunk;
    set_tokens(twice, [](std::int64_t token) { return token / 2; });
    const Rows a = run_rows(once);
    Rows b = run_rows(twice);
    for (float& lse : b.lse) lse -= std::log(2.0F);
    expect_near(b.o, a.o, 1e-6F);
    expect_near(b.lse, a.lse, 2e-6F);
  }
}

TEST_P(AlgebraTest, TheOrderOfKeysDoesNotMatter) {
  CaseSpec spec = one_sequence(257);
  const Rows forwards = run_rows(spec);
  set_tokens(spec, [](std::int64_t token) { return token * 100 % 257; });  // 257 is prime
  const Rows shuffled = run_rows(spec);
  expect_near(shuffled.o, forwards.o, 1e-6F);
  expect_near(shuffled.lse, forwards.lse, 2e-6F);
}

TEST_P(AlgebraTest, OutputIsLinearInV) {
  CaseSpec spec = one_sequence(190);
  const ValueFn first = noise(31);
  const ValueFn second = noise(32);
  spec.v_value = first;
  const Rows a = run_rows(spec);
  spec.v_value = second;
  const Rows b = run_rows(spec);
  spec.v_value = [&](std::int64_t seq, std::int64_t head, std::int64_t token, std::int64_t d) {
    return 3.0 * first(seq, head, token, d) - 0.5 * second(seq, head, token, d);
  };
  const Rows both = run_rows(spec);
  for (std::size_t i = 0; i < both.o.size(); ++i) EXPECT_NEAR(both.o[i], 3.0F * a.o[i] - 0.5F * b.o[i], 3e-6F);
  EXPECT_EQ(both.lse, a.lse);
}

TEST_P(AlgebraTest, OutputLiesBetweenTheSmallestAndTheLargestV) {
  for (const KvFormat format : kPlainFormats) {
    CaseSpec spec = one_sequence(100);
    spec.problem.k_format = spec.problem.v_format = format;
    spec.problem.q_dtype = static_cast<DType>(format);
    spec.v_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
      return 1.0 + static_cast<double>((token * 7 + d) % 16) / 16.0;
    };
    for (const float o : run_rows(spec).o) {
      EXPECT_GE(o, 1.0F - 1e-6F);
      EXPECT_LE(o, 1.9375F + 1e-6F);
    }
  }
}

TEST_P(AlgebraTest, LseGrowsWithEveryKey) {
  CaseSpec spec = one_sequence(120);
  const Plan plan = plan_case(spec, device());
  std::vector<double> last(6, -kInf);
  for (std::int32_t kv_len = 0; kv_len <= 120; ++kv_len) {
    spec.kv_lens = {kv_len};
    CaseTensors tensors(spec);
    ASSERT_EQ(run_case(plan, spec, tensors), "");
    for (std::int64_t head = 0; head < 6; ++head) {
      const double lse = tensors.lse_value(0, head, 0);
      EXPECT_TRUE(kv_len == 0 ? lse == -kInf : lse > last[static_cast<std::size_t>(head)] - 1e-6) << kv_len;
      last[static_cast<std::size_t>(head)] = lse;
    }
  }
}

KVONCE_ON_EVERY_TARGET(AlgebraTest);

}  // namespace
}  // namespace kvonce::conformance
