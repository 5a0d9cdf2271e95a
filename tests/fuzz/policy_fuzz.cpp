// Fuzz entry of the policy files: whatever the text, parsing ends with an Error of one line, or with rules that read the same
// when they are printed, and under which make_plan plans or refuses. The text as a list of values (`--policy`) likewise.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvonce/kvonce.hpp"
#include "require.hpp"

using kvonce::fuzz::require;
using kvonce::fuzz::require_message;

namespace {

kvonce::Problem some_problem() {
  kvonce::Problem problem;
  problem.num_q_heads = 32;
  problem.num_kv_heads = 4;
  problem.head_dim_qk = 128;
  problem.max_kv_len = 4096;
  return problem;
}

void parse_values(std::string_view text) {
  try {
    const kvonce::Policy policy = kvonce::parse_policy(text);
    require(to_string(kvonce::parse_policy(to_string(policy))) == to_string(policy));
  } catch (const kvonce::Error& error) {
    require(error.code() == kvonce::ErrorCode::InvalidArgument);
    require_message(error);
  }
}

// All rules in one file: the parser describes the machine's devices once a file, which takes a millisecond.
void require_read_back(const std::vector<kvonce::PolicyRule>& rules) {
  std::string text = "kvonce.policy/1\n";
  std::vector<std::string> lines;
  for (const kvonce::PolicyRule& rule : rules) {
    require(rule.line >= 2);
    const std::string line = to_string(rule);
    if (line.ends_with(':')) continue;  // chooses everything: no rule that a file can hold
    lines.push_back(line);
    text += line + '\n';
  }
  const kvonce::PolicyFile again = kvonce::parse_policy_file(text, "printed");
  require(again.rules.size() == lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) require(to_string(again.rules[i]) == lines[i]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  parse_values(text);
  auto file = std::make_shared<kvonce::PolicyFile>();
  try {
    *file = kvonce::parse_policy_file(text, "fuzzed");
  } catch (const kvonce::Error& error) {
    require(error.code() == kvonce::ErrorCode::InvalidArgument);
    require_message(error);
    return 0;
  }
  require_read_back(file->rules);
  static const kvonce::Device device = kvonce::cpu_device("portable", 2);
  kvonce::PlanOptions options;
  options.policy_file = file;
  try {
    require(kvonce::make_plan(some_problem(), device, options).policy().row_tile >= 1);
  } catch (const kvonce::Error& error) {
    require_message(error);
  }
  return 0;
}
