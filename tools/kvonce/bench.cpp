#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "bench/seed_cases.hpp"
#include "kvonce/bench_arms.hpp"
#include "kvonce/bench_run.hpp"
#include "kvonce/commands.hpp"
#include "kvonce/device_options.hpp"
#include "kvonce/output.hpp"
#include "kvonce/report.hpp"

namespace kvonce::tool {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::InvalidArgument, message); }

// One case string per line; '#' starts a comment.
std::vector<CaseSpec> parse_case_lines(std::string_view text, const std::string& source) {
  std::vector<CaseSpec> cases;
  int line_number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line_number;
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    while (line.ends_with('\r')) line.remove_suffix(1);
    try {
      cases.push_back(parse_case(line));
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}:{}: {}", source, line_number, error.what()));
    }
  }
  return cases;
}

std::string read_file(const std::string& path) {
  std::ostringstream text;
  std::error_code error;
  std::ifstream file(path, std::ios::binary);
  if (file && !std::filesystem::is_directory(path, error)) text << file.rdbuf();
  if (!file || std::filesystem::is_directory(path, error)) refuse(fmt::format("--cases: '{}' cannot be read", path));
  return text.str();
}

std::vector<CaseSpec> choose_cases(const BenchOptions& options) {
  std::vector<CaseSpec> cases;
  if (!options.cases_path.empty()) {
    cases = parse_case_lines(read_file(options.cases_path), options.cases_path);
    if (cases.empty()) refuse(fmt::format("--cases: '{}' holds no case", options.cases_path));
  }
  for (const std::string& text : options.case_texts) cases.push_back(parse_case(text));
  if (cases.empty()) cases = parse_case_lines(bench::kSeedCases, "bench/cases/seed.txt");
  return cases;
}

// In the order of arm_names(), each once.
std::vector<std::string> choose_arms(const std::vector<std::string>& wanted) {
  const std::vector<std::string>& names = arm_names();
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

// Known before the work starts, and without leaving a file behind when the work then fails.
void require_writable(const std::string& option, const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path parent = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  std::error_code ignored;
  const bool is_file = fs::exists(path, ignored) && !fs::is_directory(path, ignored);
  const bool writable = is_file ? ::access(path.c_str(), W_OK) == 0
                                : !fs::exists(path, ignored) && ::access(parent.c_str(), W_OK | X_OK) == 0;
  if (!writable) refuse(fmt::format("{}: '{}' cannot be written", option, path));
}

void write_output(const std::string& option, const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) refuse(fmt::format("{}: '{}' cannot be written", option, path));
}

}  // namespace

int run_bench(const BenchOptions& options) {
  BenchSettings settings;
  settings.cases = choose_cases(options);
  settings.arms = choose_arms(options.arms);
  settings.rounds = options.rounds;
  const std::optional<KvFormat> dtype = parse_format(options.dtype);
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
