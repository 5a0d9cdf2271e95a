#include "kvonce/tune_search.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "kvonce/tune_candidates.hpp"

namespace kvonce::tool {
namespace {

TuneTrial trial(double ratio, std::array<double, 4> quarters, double worst_case) {
  TuneTrial trial;
  trial.ratio = ratio;
  trial.quarters = quarters;
  trial.worst_case = worst_case;
  return trial;
}

TEST(TuneSearchTest, AWinIsMoreThanNoise) {
  EXPECT_TRUE(wins(trial(1.04, {1.04, 1.05, 1.03, 1.04}, 1.0)));
  EXPECT_TRUE(wins(trial(1.04, {1.04, 0.90, 1.05, 1.04}, 1.0))) << "one disturbed quarter";
  EXPECT_FALSE(wins(trial(1.02, {1.04, 1.05, 1.03, 1.04}, 1.0)));
  EXPECT_FALSE(wins(trial(1.30, {1.00, 2.00, 1.01, 1.50}, 1.0))) << "two lucky quarters";
  EXPECT_FALSE(wins(trial(1.10, {1.10, 1.10, 1.10, 1.10}, 0.97))) << "one of the cases loses";
}

Problem problem(std::int64_t group_size, KvFormat format = KvFormat::f16) {
  Problem p;
  p.num_q_heads = 2 * group_size;
  p.num_kv_heads = 2;
  p.head_dim_qk = p.head_dim_v = 64;
  p.max_kv_len = 512;
  p.k_format = p.v_format = format;
  return p;
}

TEST(TuneSearchTest, RowsThatRunAlikeShareARule) {
  const Device device = cpu_device("portable", 1);
  const auto rule = [&](std::int64_t rows) { return to_string(rule_of(problem(rows), device)); };
  EXPECT_EQ(rule(1), "target=portable k=f16 v=f16 rows=1 dims=64:");
  EXPECT_EQ(rule(2), "target=portable k=f16 v=f16 rows=2..4 dims=64:");
  EXPECT_EQ(rule(4), rule(2));
  EXPECT_EQ(rule(5), "target=portable k=f16 v=f16 rows=5..8 dims=64:");
  EXPECT_EQ(rule(8), rule(5));
  EXPECT_EQ(rule(9), "target=portable k=f16 v=f16 rows=9..16 dims=64:");
  EXPECT_EQ(rule(17), "target=portable k=f16 v=f16 rows=17.. dims=64:");
  for (const std::int64_t rows : {1, 3, 8, 16, 1000}) {
    EXPECT_TRUE(rule_of(problem(rows), device).matches(problem(rows), device)) << rows;
  }
}

TEST(TuneSearchTest, CandidatesChangeOneTunableAndArePossible) {
  const Device device = cpu_device("portable", 2);
  const Policy chosen = make_plan(problem(4), device).policy();
  std::set<std::string> texts;
  for (const Candidate& candidate : tune_candidates(problem(4), device, {})) {
    PlanOptions options;
    options.policy = candidate.policy;
    EXPECT_NE(to_string(make_plan(problem(4), device, options).policy()), to_string(chosen)) << candidate.text;
    EXPECT_EQ(to_string(parse_policy(candidate.text)), to_string(candidate.policy));
    EXPECT_TRUE(texts.insert(candidate.text).second) << candidate.text << " twice";
  }
  EXPECT_TRUE(texts.contains("row_tile=2")) << "4 rows as 2 + 2";
  EXPECT_TRUE(texts.contains("row_tile=1"));
  EXPECT_TRUE(texts.contains("prefetch_tokens=0"));
  EXPECT_FALSE(texts.contains("pair_dot=1")) << "not on this target";
  const auto has_worker_bytes = [&](std::int64_t kv_len) {
    Problem p = problem(4);
    p.max_kv_len = kv_len;
    const auto candidates = tune_candidates(p, device, {});
    return std::any_of(candidates.begin(), candidates.end(),
                       [](const Candidate& c) { return c.text.starts_with("worker_bytes="); });
  };
  EXPECT_TRUE(has_worker_bytes(chosen.worker_bytes / 512 + 1)) << "512 bytes per token: two workers, or one";
  EXPECT_FALSE(has_worker_bytes(chosen.worker_bytes)) << "both workers, whatever the limit";
}

TEST(TuneSearchTest, APoorStartIsFoundAndWritten) {
  TuneSettings settings;
  settings.cases = {parse_case("64q/1kv d64x1024 kv=512"), parse_case("64q/1kv d64x1024 kv=256")};
  settings.dtypes = {KvFormat::f32};
  settings.device = default_device();
  settings.device.num_threads = 1;
  settings.seconds = 0.6;
  settings.start.chunk_tokens = 16;  // 256 KB of partials per 68 KB of K and V: joining them is most of the work
  // Measured on a machine that may be busy with something else: three tries.
  std::vector<TuneOutcome> outcomes;
  for (int i = 0; i < 3 && (outcomes.empty() || outcomes.front().rule.policy.chunk_tokens != 32); ++i) {
    outcomes = tune(settings);
    ASSERT_EQ(outcomes.size(), 1U);
  }
  const TuneOutcome& outcome = outcomes.front();
  EXPECT_TRUE(outcome.wrong.empty());
  const auto larger = std::find_if(outcome.alone.begin(), outcome.alone.end(),
                                   [](const TuneTrial& t) { return t.candidate == "chunk_tokens=32"; });
  ASSERT_NE(larger, outcome.alone.end());
  EXPECT_TRUE(larger->wins) << larger->ratio;
  ASSERT_TRUE(outcome.kept.has_value());
  EXPECT_EQ(outcome.rule.policy.chunk_tokens, 32);
  const TuneTrial& kept = outcome.confirmed.at(*outcome.kept);
  ASSERT_EQ(kept.figures.size(), 2U);
  for (const TuneFigure& figure : kept.figures) EXPECT_GT(figure.after_gbps, figure.before_gbps) << figure.case_text;
  EXPECT_EQ(parse_policy_file("kvonce.policy/1\n" + to_string(outcome.rule), "tuned").rules[0].policy.chunk_tokens, 32);
}

}  // namespace
}  // namespace kvonce::tool
