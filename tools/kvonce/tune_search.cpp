#include "kvonce/tune_search.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>

#include "kvonce/bench_timing.hpp"
#include "kvonce/output.hpp"
#include "kvonce/tune_candidates.hpp"

namespace kvonce::tool {
namespace {

constexpr double kWin = 1.03;        // what counts as more than noise
constexpr double kWorstCase = 0.98;  // no case of a rule may lose more
constexpr std::int64_t kMinRounds = 12;
constexpr std::int64_t kMaxRounds = 400;
constexpr double kAloneShare = 0.55;  // of a rule's time; the rest confirms

double geometric_mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += std::log(value);
  return std::exp(sum / static_cast<double>(values.size()));
}

void set_row_range(PolicyRule& rule, std::int64_t rows) {
  constexpr std::int64_t kLast[] = {1, 4, 8, 16};
  rule.min_rows = 1;
  for (const std::int64_t last : kLast) {
    rule.max_rows = last;
    if (rows <= last) return;
    rule.min_rows = last + 1;
  }
  rule.max_rows = PolicyRule().max_rows;
}

// Cases of one rule.
struct RuleCases {
  TuneOutcome outcome;
  std::vector<CaseSpec> specs;
  std::vector<CaseData> data;
};

std::string rule_title(const std::vector<CaseSpec>& specs, const Problem& problem) {
  std::string text;
  for (const CaseSpec& spec : specs) {
    CaseSpec plain = spec;
    plain.dtype.reset();
    text += (text.empty() ? "" : "; ") + to_string(plain);
  }
  return fmt::format("{} {}", to_string(problem.k_format), text);
}

class Tuner {
 public:
  explicit Tuner(const TuneSettings& settings) : settings_(settings), team_{settings.device.num_threads} {
    start_.policy = settings.start;
    start_.policy_file = std::make_shared<PolicyFile>();  // not what KVONCE_POLICY says
    for (const KvFormat dtype : settings.dtypes) {
      for (const CaseSpec& spec : settings.cases) {
        const bool is_repeated = spec.dtype && dtype != settings.dtypes.front();
        if (!is_repeated) add_case(spec, spec.dtype.value_or(dtype));
      }
    }
  }

  std::vector<TuneOutcome> run() {
    cpu::Pool::shared().reserve(team_.num_threads);
    Progress progress("tune: rule");
    std::vector<TuneOutcome> outcomes;
    for (RuleCases& cases : rules_) {
      progress.update(static_cast<std::int64_t>(outcomes.size()) + 1, static_cast<std::int64_t>(rules_.size()));
      tune_rule(cases);
      outcomes.push_back(std::move(cases.outcome));
    }
    return outcomes;
  }

 private:
  void add_case(const CaseSpec& spec, KvFormat dtype) {
    const Problem problem = timed_problem(spec, dtype);
    (void)make_plan(problem, settings_.device, start_);  // refuses what cannot run before anything is timed
    CaseData data = lay_out_case(problem, rotation_bytes(settings_.device));
    buffer_bytes_ = std::max(buffer_bytes_, data.num_sets * data.set_bytes);
    const PolicyRule rule = rule_of(problem, settings_.device);
    auto found = std::find_if(rules_.begin(), rules_.end(),
                              [&](const RuleCases& cases) { return to_string(cases.outcome.rule) == to_string(rule); });
    if (found == rules_.end()) {
      found = rules_.insert(rules_.end(), RuleCases{});
      found->outcome.rule = rule;
    }
    found->specs.push_back(spec);
    found->data.push_back(std::move(data));
  }

  void tune_rule(RuleCases& cases) {
    TuneOutcome& outcome = cases.outcome;
    const Problem& problem = cases.data.front().problem;
    outcome.title = rule_title(cases.specs, problem);
    buffer_.prepare(buffer_bytes_, problem.k_format, team_);
    for (CaseData& data : cases.data) place_case(data, buffer_);

    std::vector<const CaseData*> by_size;
    for (const CaseData& data : cases.data) by_size.push_back(&data);
    std::sort(by_size.begin(), by_size.end(),
              [](const CaseData* a, const CaseData* b) { return a->kv_bytes() < b->kv_bytes(); });
    const CaseData* const middle = by_size[by_size.size() / 2];
    const double seconds = settings_.seconds / static_cast<double>(rules_.size());
    const std::vector<Candidate> candidates = tune_candidates(middle->problem, settings_.device, start_);
    outcome.alone = measure(candidates, {middle}, kAloneShare * seconds, outcome);

    const std::vector<Candidate> winners = winners_of(candidates, outcome.alone);
    if (winners.empty()) return;
    outcome.confirmed = measure(winners, by_size, (1.0 - kAloneShare) * seconds, outcome);
    for (std::size_t i = 0; i < winners.size(); ++i) {
      const TuneTrial& trial = outcome.confirmed[i];
      if (trial.wins && (!outcome.kept || trial.ratio > outcome.confirmed[*outcome.kept].ratio)) outcome.kept = i;
    }
    if (!outcome.kept) return;
    outcome.rule.policy = winners[*outcome.kept].policy;
    if (outcome.rule.policy.pair_dot >= 0) outcome.rule.q_dtype = problem.q_dtype;  // pairs need both as bf16
  }

  // The best value of every tunable that won, all together; and the best one alone, if that is something else.
  [[nodiscard]] std::vector<Candidate> winners_of(const std::vector<Candidate>& candidates,
                                                  const std::vector<TuneTrial>& trials) const {
    std::vector<std::size_t> best;  // one per tunable
    for (std::size_t i = 0; i < trials.size(); ++i) {
      if (!trials[i].wins) continue;
      const auto same = std::find_if(best.begin(), best.end(),
                                     [&](std::size_t b) { return candidates[b].field == candidates[i].field; });
      if (same == best.end()) {
        best.push_back(i);
      } else if (trials[i].ratio > trials[*same].ratio) {
        *same = i;
      }
    }
    if (best.empty()) return {};
    std::sort(best.begin(), best.end(),
              [&](std::size_t a, std::size_t b) { return trials[a].ratio > trials[b].ratio; });
    std::vector<Candidate> winners;
    if (best.size() > 1) {
      Candidate together = candidates[best.front()];
      for (std::size_t i = 1; i < best.size(); ++i) together = joined(together, candidates[best[i]]);
      winners.push_back(together);
    }
    winners.push_back(candidates[best.front()]);
    return winners;
  }

  // Times every candidate beside the built-in choice on each case.
  std::vector<TuneTrial> measure(const std::vector<Candidate>& candidates, const std::vector<const CaseData*>& cases,
                                 double seconds, TuneOutcome& outcome) const {
    struct Ratios {
      std::vector<double> whole;  // per case
      std::array<std::vector<double>, 4> quarters;
    };
    std::vector<Ratios> ratios(candidates.size());
    std::vector<TuneTrial> trials(candidates.size());
    for (const CaseData* data : cases) {
      Rotation rotation(data->num_sets);
      const std::vector<Arm> arms = make_arms(candidates, *data, outcome);
      const RoundLimits limits{kMinRounds, kMaxRounds, seconds / static_cast<double>(cases.size())};
      const std::vector<std::vector<double>> us = time_arms(arms, limits, rotation);
      for (std::size_t i = 0; i < candidates.size(); ++i) {
        std::vector<double> paired(us[0].size());
        std::transform(us[0].begin(), us[0].end(), us[i + 1].begin(), paired.begin(), std::divides<>());
        ratios[i].whole.push_back(median(paired));
        for (std::size_t q = 0; q < 4; ++q) {
          const auto at = [&](std::size_t quarter) {
            return paired.begin() + static_cast<std::ptrdiff_t>(paired.size() * quarter / 4);
          };
          ratios[i].quarters[q].push_back(median(std::vector<double>(at(q), at(q + 1))));
        }
        trials[i].figures.push_back(figure_of(*data, median(us[0]), median(us[i + 1])));
      }
    }
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      TuneTrial& trial = trials[i];
      trial.candidate = candidates[i].text;
      trial.ratio = geometric_mean(ratios[i].whole);
      trial.worst_case = *std::min_element(ratios[i].whole.begin(), ratios[i].whole.end());
      for (std::size_t q = 0; q < 4; ++q) trial.quarters[q] = geometric_mean(ratios[i].quarters[q]);
      trial.wins = wins(trial);
    }
    return trials;
  }

  // The start, then the candidates; each has run once and been compared with the oracle.
  [[nodiscard]] std::vector<Arm> make_arms(const std::vector<Candidate>& candidates, const CaseData& data,
                                           TuneOutcome& outcome) const {
    const bench::TargetKernels& kernels = bench::target_kernels(settings_.device.target);
    std::vector<Arm> arms{make_arm("kvonce", data, settings_.device, start_, kernels, kernels.read_loops[0])};
    for (const Candidate& candidate : candidates) {
      PlanOptions options = start_;
      options.policy = candidate.policy;
      arms.push_back(make_arm("kvonce", data, settings_.device, options, kernels, kernels.read_loops[0]));
    }
    for (std::size_t i = 0; i < arms.size(); ++i) {
      arms[i].run(0);
      const std::optional<double> error = arms[i].error();
      if (error && *error <= arms[i].max_error) continue;
      outcome.wrong.push_back(fmt::format("{} with {}: relative RMS error {:.2e} against the oracle, allowed {:.0e}",
                                          outcome.title, i == 0 ? "the built-in choice" : candidates[i - 1].text,
                                          error.value_or(0.0), arms[i].max_error));
    }
    return arms;
  }

  static TuneFigure figure_of(const CaseData& data, double before_us, double after_us) {
    const Problem& p = data.problem;
    const auto bytes = static_cast<double>(data.kv_bytes());
    return {fmt::format("kv={} q={} seqs={}", p.max_kv_len, p.q_len, p.num_seqs), bytes / before_us * 1e-3,
            bytes / after_us * 1e-3};
  }

  const TuneSettings& settings_;
  bench::Team team_;
  PlanOptions start_;
  BenchBuffer buffer_;
  std::int64_t buffer_bytes_ = 0;
  std::vector<RuleCases> rules_;
};

}  // namespace

bool wins(const TuneTrial& trial) {
  const auto good = std::count_if(trial.quarters.begin(), trial.quarters.end(), [](double q) { return q >= kWin; });
  return trial.ratio >= kWin && good >= 3 && trial.worst_case >= kWorstCase;
}

PolicyRule rule_of(const Problem& problem, const Device& device) {
  PolicyRule rule;
  rule.target = device.target;
  rule.k_format = problem.k_format;
  rule.v_format = problem.v_format;
  set_row_range(rule, problem.rows_per_stream());
  rule.min_dims = rule.max_dims = problem.head_dim_qk;
  return rule;
}

std::vector<TuneOutcome> tune(const TuneSettings& settings) { return Tuner(settings).run(); }

}  // namespace kvonce::tool
