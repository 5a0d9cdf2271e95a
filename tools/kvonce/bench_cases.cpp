#include "kvonce/bench_cases.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "bench/default_cases.hpp"
#include "kvonce/types.hpp"

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

}  // namespace

std::vector<CaseSpec> choose_cases(const std::string& cases_path, const std::vector<std::string>& case_texts,
                                   Backend backend) {
  std::vector<CaseSpec> cases;
  if (!cases_path.empty()) {
    cases = parse_case_lines(read_file(cases_path), cases_path);
    if (cases.empty()) refuse(fmt::format("--cases: '{}' holds no case", cases_path));
  }
  for (const std::string& text : case_texts) cases.push_back(parse_case(text));
  if (cases.empty() && backend == Backend::cuda) cases = parse_case_lines(bench::kCudaCases, "bench/cases/cuda.txt");
  if (cases.empty()) cases = parse_case_lines(bench::kSeedCases, "bench/cases/seed.txt");
  return cases;
}

}  // namespace kvonce::tool
