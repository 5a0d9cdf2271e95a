// Measures the tunables: candidates beside the built-in choice, what wins alone, then what wins together.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "kvonce/case_string.hpp"
#include "kvonce/policy_file.hpp"

namespace kvonce::tool {

struct TuneSettings {
  std::vector<CaseSpec> cases;
  std::vector<KvFormat> dtypes;  // of cases without their own: every one of them
  Device device;
  double seconds = 60.0;  // for all cases together, about
  Policy start;           // what candidates are compared with and differ from in one field; open: the built-in choice
};

/// GB/s of one case, K and V bytes counted once.
struct TuneFigure {
  std::string case_text;  // "kv=8192 q=1 seqs=1"
  double before_gbps = 0.0;
  double after_gbps = 0.0;
};

/// A candidate beside the built-in choice. Ratios are time of the built-in choice over time of the candidate.
struct TuneTrial {
  std::string candidate;             // "step_tokens=64"
  double ratio = 0.0;                // median over the rounds; geometric mean over the cases
  std::array<double, 4> quarters{};  // the same for each quarter of the rounds
  double worst_case = 0.0;           // the least of the cases' medians
  bool wins = false;                 // see wins()
  std::vector<TuneFigure> figures;   // per case
};

/// The cases that share a rule, and what was found for it.
struct TuneOutcome {
  PolicyRule rule;                   // its policy chooses everything when the built-in choice stays
  std::string title;                 // format and cases
  std::vector<TuneTrial> alone;      // each tunable alone, on the case of middle size
  std::vector<TuneTrial> confirmed;  // those that won alone, measured anew on every case: together, then the best one
  std::optional<std::size_t> kept;   // of confirmed
  std::vector<std::string> wrong;    // one sentence per candidate whose result disagrees with the oracle
};

/// More than noise: at least 1.03 in the median and in three of the four quarters of the rounds, and no case below 0.98. A
/// burst of other work on the machine moves one quarter, not three.
bool wins(const TuneTrial& trial);

/// The conditions of the rule that a problem belongs to: target, formats, head_dim_qk and the rows whose tiles are alike in
/// the kernels (1, 2 to 4, 5 to 8, 9 to 16, more).
PolicyRule rule_of(const Problem& problem, const Device& device);

/// In the order of dtypes, then of the first case of each rule. Throws Error for a case that cannot run.
std::vector<TuneOutcome> tune(const TuneSettings& settings);

}  // namespace kvonce::tool
