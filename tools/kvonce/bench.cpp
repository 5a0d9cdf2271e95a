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

// In the order of arm_names(), each once.
std::vector<std::string> choose_arms(const std::vector<std::string>& wanted, Backend backend) {
  const std::vector<std::string>& names = arm_names(backend);
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

}  // namespace

int run_bench(const BenchOptions& options) {
  BenchSettings settings;
  const Backend backend = options.device.backend;
  settings.cases = choose_cases(options.cases_path, options.case_texts, backend);
  settings.arms = choose_arms(options.arms, backend);
  settings.rounds = options.rounds;
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
