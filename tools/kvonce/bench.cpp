#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "kvonce/bench_arms.hpp"
#include "kvonce/bench_cases.hpp"
#include "kvonce/bench_run.hpp"
#include "kvonce/commands.hpp"
#include "kvonce/device_options.hpp"
#include "kvonce/output.hpp"
#include "kvonce/report.hpp"

namespace kvonce::tool {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::InvalidArgument, message); }

// What --arms may name, in the order in which it is reported.
std::vector<std::string> allowed_arms(const BenchOptions& options) {
  if (options.chain) return chain_arm_names();
  std::vector<std::string> names = arm_names(options.device.backend);
  if (options.planned_kv_len > 0) names.insert(names.end(), planned_arm_names().begin(), planned_arm_names().end());
  return names;
}

// In the order of `names`, each once.
std::vector<std::string> choose_arms(const std::vector<std::string>& wanted, const std::vector<std::string>& names) {
  for (const std::string& arm : wanted) {
    if (std::find(names.begin(), names.end(), arm) == names.end()) {
      refuse(fmt::format("--arms: must be some of {}, got '{}'", fmt::join(names, ","), arm));
    }
  }
  std::vector<std::string> arms;
  for (const std::string& name : names) {
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end()) arms.push_back(name);
  }
  return arms;
}

void require_cuda_options_fit(const BenchOptions& options, const std::vector<CaseSpec>& cases) {
  const bool planned = options.planned_kv_len > 0;
  if (options.device.backend != Backend::cuda && (options.chain || planned)) {
    refuse(fmt::format("{}: is for backend cuda; add --backend cuda", options.chain ? "--chain" : "--planned-kv-len"));
  }
  if (options.chain && planned) refuse("--planned-kv-len: is for isolated calls; leave it out with --chain");
  if (options.chain && !options.svg_path.empty()) refuse("--svg: draws isolated calls; leave it out with --chain");
  for (const CaseSpec& spec : cases) {
    if (planned && options.planned_kv_len < spec.kv_len) {
      refuse(fmt::format("--planned-kv-len: must be at least the {} tokens of case '{}', got {}", spec.kv_len,
                         to_string(spec), options.planned_kv_len));
    }
  }
}

}  // namespace

int run_bench(const BenchOptions& options) {
  BenchSettings settings;
  const Backend backend = options.device.backend;
  settings.cases = choose_cases(options.cases_path, options.case_texts, backend);
  require_cuda_options_fit(options, settings.cases);
  settings.arms = choose_arms(options.arms, allowed_arms(options));
  settings.rounds = options.rounds;
  settings.chain = options.chain;
  settings.planned_kv_len = options.planned_kv_len;
  const char* const usual = backend == Backend::cuda ? "bf16" : "f16";
  const std::optional<KvFormat> dtype = parse_format(options.dtype.empty() ? usual : options.dtype);
  if (!dtype) refuse(fmt::format("--dtype: must be one of {}, got '{}'", format_names(), options.dtype));
  settings.dtype = *dtype;
  settings.device = choose_device(options.device);
  settings.plan = plan_options(options.device);
  if (!options.out_path.empty()) require_writable("--out", options.out_path);
  if (!options.svg_path.empty()) require_writable("--svg", options.svg_path);

  const BenchOutcome outcome = run_bench(settings);
  const bool compact = !options.format && ::isatty(STDOUT_FILENO) == 1;
  print(compact ? render_compact(outcome.report) : render(outcome.report, options.format.value_or(Format::md)));
  if (!options.out_path.empty()) write_output("--out", options.out_path, render(outcome.report, Format::json));
  if (!options.svg_path.empty()) write_output("--svg", options.svg_path, render_svg(outcome.report));
  for (const std::string& sentence : outcome.wrong) fmt::print(stderr, "kvonce bench: {}\n", sentence);
  return outcome.wrong.empty() ? 0 : 1;
}

}  // namespace kvonce::tool
