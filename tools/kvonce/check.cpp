// kvonce check: the conformance suite on this machine.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "conformance/conformance.hpp"
#include "kvonce/commands.hpp"
#include "kvonce/device_options.hpp"
#include "kvonce/output.hpp"
#include "kvonce/plan.hpp"

namespace kvonce::tool {
namespace {

using conformance::CaseResult;
using conformance::Level;

constexpr int kCheckFailed = 1;

// The results of one target, and how long they took.
struct TargetResults {
  std::string target;
  std::vector<CaseResult> results;
  double seconds = 0.0;

  [[nodiscard]] std::int64_t count(CaseResult::Status status) const {
    return std::count_if(results.begin(), results.end(), [&](const CaseResult& r) { return r.status == status; });
  }
  [[nodiscard]] double worst_error() const {
    double worst = 0.0;
    for (const CaseResult& result : results) worst = std::max(worst, result.rel_rms_error);
    return worst;
  }
};

CaseResult skipped_target(const std::string& target, const std::string& reason) {
  CaseResult result;
  result.name = "target " + target;
  result.status = CaseResult::skipped;
  result.detail = reason;
  return result;
}

TargetResults check_target(const Device& device, Level level, Progress& progress, std::int64_t& num_done) {
  TargetResults target;
  target.target = device.target;
  const auto on_result = [&](const CaseResult&) { progress.update(++num_done); };
  const auto begin = std::chrono::steady_clock::now();
  target.results = run_exact(device, level, on_result);
  for (CaseResult& result : run_grid(device, level, on_result)) target.results.push_back(std::move(result));
  target.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return target;
}

std::string name_of(const Device& device) {
  return device.target.empty() ? std::string(to_string(device.backend)) : device.target;
}

bool is_asked_for(const Device& device, const CheckOptions& options) {
  if (device.backend == Backend::metal) return false;
  return options.backend.empty() || options.backend == to_string(device.backend);
}

// The named target, the backend's, or all. What does not run is there as one skipped result. Of several CUDA devices the
// first is checked: the current one.
std::vector<TargetResults> check_targets(const CheckOptions& options, Level level) {
  // One target's quick cases take 2 to 10 s: one that starts later than this could end after 20 s.
  constexpr std::chrono::seconds kLatestQuickStart{8};
  Progress progress("checking, cases done:");
  std::int64_t num_done = 0;
  if (!options.target.empty()) return {check_target(cpu_device(options.target), level, progress, num_done)};
  const auto begin = std::chrono::steady_clock::now();
  std::vector<TargetResults> targets;
  for (const Device& device : devices()) {
    if (!is_asked_for(device, options) || device.ordinal > 0) continue;
    if (!device.unavailable.empty()) {
      targets.push_back({name_of(device), {skipped_target(name_of(device), device.unavailable)}, 0.0});
    } else if (options.quick && std::chrono::steady_clock::now() - begin > kLatestQuickStart) {
      targets.push_back({device.target, {skipped_target(device.target, "no time left for it with --quick")}, 0.0});
    } else {
      targets.push_back(check_target(device, level, progress, num_done));
    }
  }
  return targets;
}

std::string_view status_name(CaseResult::Status status) {
  switch (status) {
    case CaseResult::passed:
      return "passed";
    case CaseResult::failed:
      return "failed";
    case CaseResult::skipped:
      break;
  }
  return "skipped";
}

Table result_table(const std::vector<TargetResults>& targets) {
  Table table;
  table.columns = {"target", "status", "case", "kernel", "rel_rms_error", "detail"};
  for (const TargetResults& target : targets) {
    for (const CaseResult& result : target.results) {
      table.rows.push_back({target.target, std::string(status_name(result.status)), result.name, result.kernel_id,
                            result.rel_rms_error, result.detail});
    }
  }
  return table;
}

std::string describe(const std::vector<TargetResults>& targets) {
  Table table;
  table.columns = {"target", "passed", "failed", "skipped", "worst_rel_rms_error", "seconds"};
  std::string details;
  for (const TargetResults& target : targets) {
    table.rows.push_back({target.target, target.count(CaseResult::passed), target.count(CaseResult::failed),
                          target.count(CaseResult::skipped), target.worst_error(), target.seconds});
    for (const CaseResult& result : target.results) {
      if (result.status == CaseResult::passed) continue;
      details += fmt::format("{} {}: {}\n", status_name(result.status), result.name, result.detail);
    }
  }
  return render(table, Format::md) + (details.empty() ? "" : "\n" + details) + "\n";
}

}  // namespace

int run_check(const CheckOptions& options) {
  if (!options.policy.empty()) {
    DeviceOptions device_options;
    device_options.policy = "@" + options.policy;
    (void)plan_options(device_options);  // refuses what is no policy file
    // The suite makes its plans itself; the file reaches them as it reaches every program's.
    ::setenv("KVONCE_POLICY", options.policy.c_str(), 1);
  }
  const Level level = options.quick ? Level::quick : options.full ? Level::full : Level::standard;
  const std::vector<TargetResults> targets = check_targets(options, level);
  std::int64_t num_passed = 0;
  std::int64_t num_failed = 0;
  std::int64_t num_skipped = 0;
  for (const TargetResults& target : targets) {
    num_passed += target.count(CaseResult::passed);
    num_failed += target.count(CaseResult::failed);
    num_skipped += target.count(CaseResult::skipped);
  }
  const std::string summary = fmt::format("{} passed, {} failed, {} skipped\n", num_passed, num_failed, num_skipped);
  const Format format = options.format.value_or(Format::md);
  if (format == Format::md) {
    print(describe(targets) + summary);
  } else if (format == Format::csv) {
    print(render(result_table(targets), format));
  } else {
    nlohmann::ordered_json document;
    document["schema"] = "kvonce.check/1";
    document["kvonce_version"] = version();
    document["passed"] = num_passed;
    document["failed"] = num_failed;
    document["skipped"] = num_skipped;
    document["results"] = to_json(result_table(targets));
    print(document.dump(2) + '\n');
  }
  return num_failed > 0 || num_passed == 0 ? kCheckFailed : 0;
}

}  // namespace kvonce::tool
