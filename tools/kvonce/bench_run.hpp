// Runs cases: places them, checks every arm against the oracle, then times the arms side by side.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvonce/case_string.hpp"
#include "kvonce/plan.hpp"
#include "kvonce/report.hpp"

namespace kvonce::tool {

struct BenchSettings {
  std::vector<CaseSpec> cases;
  KvFormat dtype = KvFormat::f16;  // of cases without their own
  std::vector<std::string> arms;   // of arm_names(device.backend), planned_arm_names(), chain_arm_names(); each once
  std::int64_t rounds =
      0;               // timed rounds per case; 0: as many as fit two seconds, 7 to 201; CUDA: half a second, 7 to 51
  bool chain = false;  // CUDA: what attention adds to a chain of kernels, instead of isolated calls
  std::int64_t planned_kv_len = 0;  // CUDA: the length that arm kvonce_planned is planned for
  Device device;
  PlanOptions plan;
};

struct BenchOutcome {
  BenchReport report;
  std::vector<std::string> wrong;  // one sentence per arm whose result disagrees with the oracle
};

/// Throws Error for a case or an arm that cannot run.
BenchOutcome run_bench(const BenchSettings& settings);

}  // namespace kvonce::tool
