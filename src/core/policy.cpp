#include <charconv>
#include <string>

#include "core/refuse.hpp"
#include "kvonce/plan.hpp"

namespace kvonce {
namespace {

struct Field {
  const char* name;
  std::int64_t Policy::*member;
  std::int64_t low;
};

constexpr std::int64_t kMaxValue = 1LL << 40;
constexpr Field kFields[] = {
    {"row_tile", &Policy::row_tile, 0},
    {"rows_per_worker", &Policy::rows_per_worker, 0},
    {"chunk_tokens", &Policy::chunk_tokens, 0},
    {"step_tokens", &Policy::step_tokens, 0},
    {"prefetch_tokens", &Policy::prefetch_tokens, -1},
    {"prefetch_lines", &Policy::prefetch_lines, 0},
    {"pair_dot", &Policy::pair_dot, -1},
};

}  // namespace

Policy parse_policy(std::string_view text) {
  Policy policy;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const std::size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    const std::string_view value = equals == std::string_view::npos ? std::string_view() : item.substr(equals + 1);
    const Field* field = nullptr;
    for (const Field& candidate : kFields) {
      if (key == candidate.name) field = &candidate;
    }
    if (field == nullptr) {
      core::refuse(ErrorCode::InvalidArgument, "policy", "key '" + std::string(key) + "'",
                   "row_tile, rows_per_worker, chunk_tokens, step_tokens, prefetch_tokens, prefetch_lines, pair_dot as "
                   "key=value,...");
    }
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size() || number < field->low || number > kMaxValue) {
      core::refuse(ErrorCode::InvalidArgument, "policy", std::string(item),
                   std::string(field->name) + "=" + std::to_string(field->low) + " or more");
    }
    policy.*(field->member) = number;
  }
  return policy;
}

std::string to_string(const Policy& policy) {
  std::string text;
  for (const Field& field : kFields) {
    if (!text.empty()) text += ',';
    text += std::string(field.name) + "=" + std::to_string(policy.*(field.member));
  }
  return text;
}

}  // namespace kvonce
