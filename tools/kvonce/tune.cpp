// kvonce tune: measures the tunables on this machine and writes a policy file.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "kvonce/bench_cases.hpp"
#include "kvonce/commands.hpp"
#include "kvonce/device_options.hpp"
#include "kvonce/output.hpp"
#include "kvonce/policy_file.hpp"
#include "kvonce/tune_search.hpp"

namespace kvonce::tool {
namespace {

std::vector<KvFormat> choose_dtypes(const std::vector<std::string>& names) {
  std::vector<KvFormat> dtypes;
  for (const std::string& name : names) {
    const std::optional<KvFormat> format = parse_format(name);
    if (!format || *format > KvFormat::bf16) {
      throw Error(ErrorCode::InvalidArgument, fmt::format("--dtype: must be some of f32,f16,bf16, got '{}'", name));
    }
    if (std::find(dtypes.begin(), dtypes.end(), *format) == dtypes.end()) dtypes.push_back(*format);
  }
  return dtypes;
}

std::string utc_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02} UTC", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday,
                     parts.tm_hour, parts.tm_min);
}

std::string quarters_text(const TuneTrial& trial) {
  return fmt::format("{:.2f} {:.2f} {:.2f} {:.2f}", trial.quarters[0], trial.quarters[1], trial.quarters[2],
                     trial.quarters[3]);
}

// "1.04x (quarters 1.03 1.05 1.04 1.04, worst case 1.02)"
std::string ratio_text(const TuneTrial& trial) {
  return fmt::format("{:.2f}x (quarters {}, worst case {:.2f})", trial.ratio, quarters_text(trial), trial.worst_case);
}

// One row per candidate: alone on the case of middle size, the winners again on every case.
Table trial_table(const std::vector<TuneOutcome>& outcomes) {
  Table table;
  table.columns = {"cases", "candidate", "measured", "ratio", "worst_case", "quarters", "verdict"};
  for (const TuneOutcome& outcome : outcomes) {
    for (const TuneTrial& trial : outcome.alone) {
      table.rows.push_back({outcome.title, trial.candidate, "alone", trial.ratio, trial.worst_case,
                            quarters_text(trial), trial.wins ? "measured again" : "noise or loss"});
    }
    for (std::size_t i = 0; i < outcome.confirmed.size(); ++i) {
      const TuneTrial& trial = outcome.confirmed[i];
      table.rows.push_back({outcome.title, trial.candidate, "again", trial.ratio, trial.worst_case,
                            quarters_text(trial), outcome.kept == i ? "kept" : "not kept"});
    }
  }
  return table;
}

std::string figures_text(const TuneTrial& trial) {
  std::string text;
  for (const TuneFigure& figure : trial.figures) {
    text += fmt::format("{}{} {:.1f} -> {:.1f}", text.empty() ? "" : ", ", figure.case_text, figure.before_gbps,
                        figure.after_gbps);
  }
  return text + " GB/s";
}

std::string built_in_reason(const TuneOutcome& outcome) {
  const std::vector<TuneTrial>& trials = outcome.confirmed.empty() ? outcome.alone : outcome.confirmed;
  if (trials.empty()) return "no other value is possible";
  const auto best = std::max_element(trials.begin(), trials.end(),
                                     [](const TuneTrial& a, const TuneTrial& b) { return a.ratio < b.ratio; });
  return fmt::format("the best other, {}, made {}", best->candidate, ratio_text(*best));
}

std::string file_text(const std::vector<TuneOutcome>& outcomes, const Device& device, const std::string& command) {
  std::string text = fmt::format(
      "kvonce.policy/1\n"
      "# Written by kvonce {} on {}: {}\n"
      "# {}, target {}, {} threads\n"
      "# GB/s count each byte of K and V once. Ratios: time of the built-in choice / time of the rule, in the median "
      "and in\n"
      "# each quarter of the rounds. A rule is kept when it wins 3 % in the median and in three quarters, twice.\n",
      version(), utc_time(), command, device.name, device.target, device.num_threads);
  for (const TuneOutcome& outcome : outcomes) {
    text += fmt::format("\n# {}\n", outcome.title);
    if (outcome.kept) {
      const TuneTrial& trial = outcome.confirmed[*outcome.kept];
      text += fmt::format("# {}: {}\n{}\n", figures_text(trial), ratio_text(trial), to_string(outcome.rule));
    } else {
      text += fmt::format("# the built-in choice stays: {}\n", built_in_reason(outcome));
    }
  }
  return text;
}

}  // namespace

int run_tune(const TuneOptions& options) {
  constexpr double kSeconds = 60.0;
  constexpr double kQuickSeconds = 6.0;
  TuneSettings settings;
  settings.cases = choose_cases(options.cases_path, options.case_texts);
  settings.dtypes = choose_dtypes(options.dtypes);
  settings.device = choose_device(options.device);
  settings.seconds = options.quick ? kQuickSeconds : options.seconds.value_or(kSeconds);
  if (!options.out_path.empty()) require_writable("--out", options.out_path);

  const std::vector<TuneOutcome> outcomes = tune(settings);
  const std::string text = file_text(outcomes, settings.device, options.command);
  const Format format = options.format.value_or(Format::md);
  print(render(trial_table(outcomes), format));
  if (format == Format::md) print("\n" + text);
  if (!options.out_path.empty()) write_output("--out", options.out_path, text);
  bool is_right = true;
  for (const TuneOutcome& outcome : outcomes) {
    for (const std::string& sentence : outcome.wrong) fmt::print(stderr, "kvonce tune: {}\n", sentence);
    is_right = is_right && outcome.wrong.empty();
  }
  return is_right ? 0 : 1;
}

}  // namespace kvonce::tool
