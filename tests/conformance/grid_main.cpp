// conformance_grid TARGET PART: the sampled grid or the exact-answer cases on one CPU target. Exit code 0: all passed,
// 1: some failed, 2: bad usage, 77: the target cannot run here (the reason is printed).
#include <chrono>
#include <cstdio>
#include <string>

#include "conformance.hpp"

namespace {

using kvonce::conformance::CaseResult;

int run(const kvonce::Device& device, bool grid) {
  std::size_t counts[3] = {0, 0, 0};
  double worst = 0.0;
  std::string worst_name;
  const auto begin = std::chrono::steady_clock::now();
  const auto on_result = [&](const CaseResult& result) {
    ++counts[result.status];
    if (result.status == CaseResult::failed && counts[CaseResult::failed] <= 25) {
      std::printf("FAILED %s\n  %s\n  %s\n", result.name.c_str(), result.kernel_id.c_str(), result.detail.c_str());
    }
    if (result.rel_rms_error > worst && result.name.find("out=f32") != std::string::npos) {
      worst = result.rel_rms_error;
      worst_name = result.name;
    }
  };
  const auto level = kvonce::conformance::level_from_environment();
  const auto results = grid ? kvonce::conformance::run_grid(device, level, on_result)
                            : kvonce::conformance::run_exact(device, level, on_result);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  if (grid) std::printf("largest relative rms error with float32 output: %.3g (%s)\n", worst, worst_name.c_str());
  std::printf("%s: %zu passed, %zu failed, %zu skipped in %.1f s\n", device.target.c_str(), counts[CaseResult::passed],
              counts[CaseResult::failed], counts[CaseResult::skipped], seconds.count());
  return counts[CaseResult::failed] == 0 && !results.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc == 3 ? argv[2] : "";
  if (part != "grid" && part != "exact") {
    std::fprintf(stderr, "usage: conformance_grid TARGET grid|exact\n");
    return 2;
  }
  for (const kvonce::Device& device : kvonce::devices()) {
    if (device.backend != kvonce::Backend::cpu || device.target != argv[1]) continue;
    if (device.unavailable.empty()) return run(device, part == "grid");
    std::printf("not run on %s: %s\n", argv[1], device.unavailable.c_str());
    return 77;
  }
  std::fprintf(stderr, "unknown target '%s'\n", argv[1]);
  return 2;
}
