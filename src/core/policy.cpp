#include <charconv>
#include <string>
#include <vector>

#include "core/policy_fields.hpp"
#include "core/refuse.hpp"
#include "kvonce/plan.hpp"

namespace kvonce {
namespace {

constexpr std::int64_t kMaxValue = 1LL << 40;

std::string field_names() {
  std::string names;
  for (const core::PolicyField& field : core::kPolicyFields)
    names += (names.empty() ? "" : ", ") + std::string(field.name);
  return names;
}

}  // namespace

Policy parse_policy(std::string_view text) {
  Policy policy;
  std::vector<const core::PolicyField*> given;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const std::size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    const std::string_view value = equals == std::string_view::npos ? std::string_view() : item.substr(equals + 1);
    const core::PolicyField* field = nullptr;
    for (const core::PolicyField& candidate : core::kPolicyFields) {
      if (key == candidate.name) field = &candidate;
    }
    if (field == nullptr) {
      core::refuse(ErrorCode::InvalidArgument, "policy", "key " + core::quoted(key),
                   field_names() + " as key=value,...");
    }
    for (const core::PolicyField* earlier : given) {
      if (earlier == field) {
        core::refuse(ErrorCode::InvalidArgument, "policy", std::string(field->name) + " twice", "each key once");
      }
    }
    given.push_back(field);
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size() || number < field->choose || number > kMaxValue) {
      core::refuse(ErrorCode::InvalidArgument, "policy", core::printable(item),
                   std::string(field->name) + "=" + std::to_string(field->choose) + " or more");
    }
    policy.*(field->member) = number;
  }
  return policy;
}

std::string to_string(const Policy& policy) {
  std::string text;
  for (const core::PolicyField& field : core::kPolicyFields) {
    if (policy.*(field.member) == field.choose) continue;
    if (!text.empty()) text += ',';
    text += std::string(field.name) + "=" + std::to_string(policy.*(field.member));
  }
  return text;
}

}  // namespace kvonce
