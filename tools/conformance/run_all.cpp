#include <cstdlib>
#include <string_view>

#include "conformance.hpp"

namespace kvonce::conformance {
namespace {

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace

Level level_from_environment() {
  if (is_set("KVONCE_QUICK")) return Level::quick;
  return is_set("KVONCE_NIGHTLY") ? Level::full : Level::standard;
}

std::vector<CaseResult> run_all(Level level, const OnResult& on_result) {
  std::vector<CaseResult> results;
  for (const Device& device : devices()) {
    if (device.backend != Backend::cpu) continue;
    if (!device.unavailable.empty()) {
      results.push_back({device.target, CaseResult::skipped, device.unavailable, {}, 0.0});
      if (on_result) on_result(results.back());
      continue;
    }
    for (const auto& part : {run_grid(device, level, on_result), run_exact(device, level, on_result)}) {
      results.insert(results.end(), part.begin(), part.end());
    }
  }
  return results;
}

}  // namespace kvonce::conformance
