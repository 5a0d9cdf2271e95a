// Policy files: reading them strictly, finding a problem's rule, writing a rule.
#include "kvonce/policy_file.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <tuple>
#include <utility>
#include <vector>

#include "core/policy_fields.hpp"
#include "core/refuse.hpp"

namespace kvonce {
namespace {

constexpr std::string_view kHeader = "kvonce.policy/1";
constexpr std::size_t kMaxFileBytes = 1024 * 1024;
constexpr std::string_view kBlanks = " \t\r";
constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMaxRows = 1LL << 40;
constexpr std::int64_t kMaxDims = 1024;

std::string_view trim(std::string_view text) {
  const std::size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

std::vector<std::string> cpu_targets() {
  std::vector<std::string> targets;
  for (const Device& device : devices()) {
    if (device.backend == Backend::cpu) targets.push_back(device.target);
  }
  return targets;
}

class Parser {
 public:
  explicit Parser(std::string_view name) { file_.name = std::string(name); }

  PolicyFile parse(std::string_view text) {
    bool has_header = false;
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view whole = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      ++line_;
      const std::string_view line = trim(whole.substr(0, whole.find('#')));
      if (line.empty()) continue;
      if (has_header) {
        file_.rules.push_back(parse_rule(line));
      } else if (line != kHeader) {
        refuse(line, "'" + std::string(kHeader) + "' before the first rule");
      }
      has_header = true;
    }
    if (!has_header) refuse("", "'" + std::string(kHeader) + "' before the first rule");
    return std::move(file_);
  }

 private:
  [[noreturn]] void refuse(std::string_view given, const std::string& allowed) const {
    core::refuse(ErrorCode::InvalidArgument, file_.name + ":" + std::to_string(line_), core::quoted(given), allowed);
  }

  PolicyRule parse_rule(std::string_view line) {
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos) {
      refuse(line, "conditions: key=value,... such as 'k=f16 rows=5..8: step_tokens=64' or 'any: row_tile=4'");
    }
    PolicyRule rule;
    rule.line = line_;
    parse_conditions(trim(line.substr(0, colon)), rule);
    const std::string_view settings = trim(line.substr(colon + 1));
    if (settings.empty()) refuse(line, "key=value,... after the colon");
    try {
      rule.policy = parse_policy(settings);
    } catch (const Error& error) {
      throw Error(error.code(), file_.name + ":" + std::to_string(line_) + ": " + error.what());
    }
    return rule;
  }

  void parse_conditions(std::string_view text, PolicyRule& rule) {
    if (text == "any") return;
    std::array<bool, 6> seen{};
    do {
      const std::string_view word = text.substr(0, text.find_first_of(kBlanks));
      text = trim(text.substr(word.size()));
      const std::size_t index = parse_condition(word, rule);
      if (seen.at(index)) refuse(word, "each condition once");
      seen.at(index) = true;
    } while (!text.empty());
  }

  // Returns the number of the condition.
  std::size_t parse_condition(std::string_view word, PolicyRule& rule) {
    const std::size_t equals = word.find('=');
    const std::string_view key = word.substr(0, equals);
    const std::string_view value = equals == std::string_view::npos ? std::string_view() : word.substr(equals + 1);
    if (key == "target") {
      rule.target = parse_target(word, value);
      return 0;
    }
    if (key == "q") {
      rule.q_dtype = parse_name(word, value, std::array{DType::f32, DType::f16, DType::bf16});
      return 1;
    }
    if (key == "k") {
      rule.k_format = parse_format(word, value);
      return 2;
    }
    if (key == "v") {
      rule.v_format = parse_format(word, value);
      return 3;
    }
    if (key == "rows") {
      std::tie(rule.min_rows, rule.max_rows) = parse_range(word, value, kMaxRows);
      return 4;
    }
    if (key == "dims") {
      std::tie(rule.min_dims, rule.max_dims) = parse_range(word, value, kMaxDims);
      return 5;
    }
    refuse(word, "target=, q=, k=, v=, rows= and dims=, or any alone");
  }

  std::string parse_target(std::string_view word, std::string_view value) {
    if (targets_.empty()) targets_ = cpu_targets();  // once a file: describing the devices takes a millisecond
    std::string names;
    for (const std::string& target : targets_) {
      if (target == value) return target;
      names += (names.empty() ? "" : ", ") + target;
    }
    refuse(word, "target= one of " + names);
  }

  template <typename Names>
  typename Names::value_type parse_name(std::string_view word, std::string_view value, const Names& allowed) const {
    std::string names;
    for (const auto candidate : allowed) {
      if (to_string(candidate) == value) return candidate;
      names += (names.empty() ? "" : ", ") + std::string(to_string(candidate));
    }
    refuse(word, std::string(word.substr(0, word.find('='))) + "= one of " + names);
  }

  [[nodiscard]] KvFormat parse_format(std::string_view word, std::string_view value) const {
    return parse_name(word, value,
                      std::array{KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::f8_e4m3, KvFormat::mlx_int8,
                                 KvFormat::mlx_int4, KvFormat::q8_0, KvFormat::q4_0});
  }

  // "8", "5..8" or "9..".
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> parse_range(std::string_view word, std::string_view value,
                                                                  std::int64_t limit) const {
    const std::size_t dots = value.find("..");
    const std::string_view first = value.substr(0, dots);
    const std::string_view last = dots == std::string_view::npos ? first : value.substr(dots + 2);
    const std::int64_t low = parse_number(first, limit);
    const std::int64_t high = dots != std::string_view::npos && last.empty() ? kUnbounded : parse_number(last, limit);
    if (low < 1 || high < low) {
      const std::string key(word.substr(0, word.find('=')));
      refuse(word, key + "=N, N..M or N.. with 1 <= N <= M <= " + std::to_string(limit));
    }
    return {low, high};
  }

  // 0 when it is none from 1 to limit.
  static std::int64_t parse_number(std::string_view text, std::int64_t limit) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size() && number >= 1 && number <= limit ? number : 0;
  }

  PolicyFile file_;
  int line_ = 0;
  std::vector<std::string> targets_;
};

std::string range_text(std::int64_t low, std::int64_t high) {
  if (low == high) return std::to_string(low);
  return std::to_string(std::max<std::int64_t>(1, low)) + ".." + (high == kUnbounded ? "" : std::to_string(high));
}

}  // namespace

bool PolicyRule::matches(const Problem& problem, const Device& device) const noexcept {
  const std::int64_t rows = problem.rows_per_stream();
  return device.backend == Backend::cpu && (target.empty() || target == device.target) &&
         (!q_dtype || *q_dtype == problem.q_dtype) && (!k_format || *k_format == problem.k_format) &&
         (!v_format || *v_format == problem.v_format) && rows >= min_rows && rows <= max_rows &&
         problem.head_dim_qk >= min_dims && problem.head_dim_qk <= max_dims;
}

std::string to_string(const PolicyRule& rule) {
  std::string text;
  const auto add = [&text](std::string_view key, std::string_view value) {
    text += (text.empty() ? "" : " ") + std::string(key) + "=" + std::string(value);
  };
  if (!rule.target.empty()) add("target", rule.target);
  if (rule.q_dtype) add("q", to_string(*rule.q_dtype));
  if (rule.k_format) add("k", to_string(*rule.k_format));
  if (rule.v_format) add("v", to_string(*rule.v_format));
  if (rule.min_rows > 1 || rule.max_rows != kUnbounded) add("rows", range_text(rule.min_rows, rule.max_rows));
  if (rule.min_dims > 1 || rule.max_dims != kUnbounded) add("dims", range_text(rule.min_dims, rule.max_dims));
  if (text.empty()) text = "any";
  text += ":";
  const char* separator = " ";
  for (const core::PolicyField& field : core::kPolicyFields) {
    const std::int64_t value = rule.policy.*field.member;
    if (value == field.choose) continue;
    text += separator + std::string(field.name) + "=" + std::to_string(value);
    separator = ",";
  }
  return text;
}

const PolicyRule* PolicyFile::find(const Problem& problem, const Device& device) const noexcept {
  const auto found =
      std::find_if(rules.begin(), rules.end(), [&](const PolicyRule& rule) { return rule.matches(problem, device); });
  return found == rules.end() ? nullptr : &*found;
}

PolicyFile parse_policy_file(std::string_view text, std::string_view name) { return Parser(name).parse(text); }

PolicyFile load_policy_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFileBytes + 1, '\0');
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad() || (file.fail() && !file.eof())) {  // also a folder: it opens, and then cannot be read
    core::refuse(ErrorCode::InvalidArgument, "policy file", core::quoted(path) + ", which cannot be read",
                 "a policy file, as `kvonce tune --out FILE` writes it");
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes) {
    core::refuse(ErrorCode::InvalidArgument, "policy file", core::quoted(path) + " of more than 1 MiB",
                 "at most 1 MiB");
  }
  return parse_policy_file(text, path);
}

}  // namespace kvonce
