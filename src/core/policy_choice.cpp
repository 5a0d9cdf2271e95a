#include "core/policy_choice.hpp"

#include <cstdlib>
#include <optional>

#include "core/policy_fields.hpp"

namespace kvonce::core {
namespace {

// What KVONCE_POLICY named when it was first asked for.
struct EnvironmentFile {
  std::optional<PolicyFile> file;
  std::optional<Error> error;

  EnvironmentFile() {
    const char* path = std::getenv("KVONCE_POLICY");
    if (path == nullptr || *path == '\0') return;
    try {
      file = load_policy_file(path);
    } catch (const Error& refused) {
      error.emplace(refused.code(), std::string("KVONCE_POLICY: ") + refused.what());
    }
  }
};

const PolicyFile* environment_file() {
  static const EnvironmentFile environment;
  if (environment.error) throw Error(*environment.error);
  return environment.file ? &*environment.file : nullptr;
}

std::string line_of(const PolicyChoice& choice) { return choice.file->name + ":" + std::to_string(choice.rule->line); }

bool is_from_rule(const PolicyField& field, const Policy& asked, const Policy& chosen) {
  return asked.*field.member == field.choose && chosen.*field.member != field.choose;
}

std::string describe_origin(const PolicyChoice& choice, const Policy& asked) {
  if (choice.rule == nullptr) return "no rule of " + choice.file->name + " applies: built in where not asked for";
  std::string from_rule;
  std::string from_caller;
  for (const PolicyField& field : kPolicyFields) {
    std::string* names = nullptr;
    if (is_from_rule(field, asked, choice.policy)) names = &from_rule;
    if (asked.*field.member != field.choose) names = &from_caller;
    if (names != nullptr) *names += (names->empty() ? "" : ", ") + std::string(field.name);
  }
  return line_of(choice) + ": " + (from_rule.empty() ? "nothing" : from_rule) +
         (from_caller.empty() ? "" : "; the caller: " + from_caller) + "; the rest is built in";
}

}  // namespace

PolicyChoice choose_policy(const Policy& asked, const PolicyFile* file, const Problem& problem, const Device& device) {
  PolicyChoice choice;
  choice.policy = asked;
  choice.file = file != nullptr ? file : environment_file();
  if (choice.file == nullptr || (choice.file->rules.empty() && choice.file->name.empty())) return choice;
  choice.rule = choice.file->find(problem, device);
  if (choice.rule != nullptr) {
    for (const PolicyField& field : kPolicyFields) {
      if (asked.*field.member == field.choose) choice.policy.*field.member = choice.rule->policy.*field.member;
    }
    // The caller's rows_per_worker and a rule's row_tile, or the reverse, may not fit together: the rule gives way.
    Policy& policy = choice.policy;
    if (policy.rows_per_worker > 0 && policy.row_tile > policy.rows_per_worker) {
      if (asked.row_tile == 0 && asked.rows_per_worker > 0) policy.row_tile = 0;
      if (asked.rows_per_worker == 0 && asked.row_tile > 0) policy.rows_per_worker = 0;
    }
  }
  choice.origin = describe_origin(choice, asked);
  return choice;
}

std::string with_policy_line(const PolicyChoice& choice, const Policy& asked, const std::string& message) {
  if (choice.rule == nullptr) return message;
  for (const PolicyField& field : kPolicyFields) {
    const std::string name(field.name);
    if (!is_from_rule(field, asked, choice.policy)) continue;
    if (message.starts_with("policy." + name + ":") || message.starts_with(name + ":")) {
      return line_of(choice) + ": " + message;
    }
  }
  return message;
}

}  // namespace kvonce::core
