// Fuzz entry of the policy files: whatever the text, parsing ends with an Error of one line, or with rules that read the same
// when they are printed, and under which make_plan plans or refuses. The text as a list of values (`--policy`) likewise.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

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

void require_reads_back(const kvonce::PolicyRule& rule) {
  const std::string printed = to_string(rule);
  if (printed.ends_with(':')) return;  // chooses everything: no rule that a file can hold
  const kvonce::PolicyFile again = kvonce::parse_policy_file("kvonce.policy/1\n" + printed, "printed");
  require(again.rules.size() == 1 && to_string(again.rules[0]) == printed && rule.line >= 2);
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
  for (const kvonce::PolicyRule& rule : file->rules) require_reads_back(rule);
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
