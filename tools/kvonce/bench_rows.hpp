// From measured times to rows of the report: the same for every backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvonce/bench_data.hpp"
#include "kvonce/case_string.hpp"
#include "kvonce/report.hpp"

namespace kvonce::tool {

/// What of an arm goes into its row.
struct ArmLabel {
  std::string name;
  std::string kernel;
  std::int64_t read_factor = 1;
};

/// us: microseconds per call of every round, at least one.
BenchRow make_row(const CaseSpec& spec, const CaseData& data, Backend backend, const ArmLabel& arm,
                  const std::vector<double>& us);

/// Fills the ratios of one case's rows, those from `first` on, when the read arm is among them, and the device's best read.
/// roof_us = max(read time, arithmetic_us).
void finish_rows(BenchReport& report, std::size_t first, double arithmetic_us, const std::string& read_loop);

}  // namespace kvonce::tool
