// From measured times to rows of the report: the same for every backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
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

/// What the graphs of a chain took per call in every round: as many values each, at least one.
struct ChainTimes {
  std::vector<double> chain;       // producer, attention, consumer
  std::vector<double> neighbours;  // producer, consumer
  std::vector<double> isolated;    // attention alone
};
/// us_* of the row are the differences of chain and neighbours round by round.
BenchRow make_chain_row(const CaseSpec& spec, const CaseData& data, const ArmLabel& arm, std::string_view neighbours,
                        const ChainTimes& times);

/// Fills the ratios of one case's rows, those from `first` on, when the read arm is among them, and the device's best read.
/// roof_us = max(read time, arithmetic_us).
void finish_rows(BenchReport& report, std::size_t first, double arithmetic_us, const std::string& read_loop);

}  // namespace kvonce::tool
