// What one call of an arm reads, by the device's counters, with cold caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "counters/cupti_profiler.hpp"
#include "kvonce/bench_cuda_arms.hpp"

namespace kvonce::tool {

/// A metric that stands for a number of bytes.
struct ByteCounter {
  std::size_t index = 0;  // into the selected metrics
  double bytes = 1.0;     // of one count
};

/// The metrics to count and what of them the report is about.
struct CounterChoice {
  std::vector<std::string> names;
  ByteCounter dram_read;
  ByteCounter l2_to_sm;
};

/// Those asked for, or for each of both quantities the first of a list that the chip has, and one more to compare with.
/// Throws Error{InvalidArgument} naming --metrics and Error{Unsupported} when a quantity has no metric.
CounterChoice choose_counters(const Metrics& metrics, const std::vector<std::string>& asked_for);

struct CountRow {
  std::string case_text;
  ArmLabel label;
  KvFormat kv_format = KvFormat::bf16;
  std::int64_t kv_bytes = 0;
  double dram_bytes_read = 0.0;  // medians over the rounds
  double l2_to_sm_bytes = 0.0;
  std::optional<double> rel_rms_error;
  std::vector<std::vector<double>> values;  // [metric][round], as counted
};

struct CountSettings {
  BenchSettings bench;  // cases, arms, dtype, device, plan
  CounterChoice counters;
  std::int64_t rounds = 5;
  std::int64_t flush_bytes = 0;
};

struct CountOutcome {
  std::vector<CountRow> rows;
  std::vector<std::string> wrong;  // one sentence per arm that failed or disagrees with the oracle
};

/// `metrics` has the choice's names selected. Throws Error for a case or an arm that cannot run.
CountOutcome count_cases(const CountSettings& settings, const CuptiDevice& device, const Metrics& metrics);

}  // namespace kvonce::tool
