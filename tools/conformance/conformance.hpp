// The conformance suite: cases generated from a fixed seed, run on a device and judged against the fp64 oracle or
// against answers that are exact by construction. `kvonce check` and tests/conformance use it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvonce/kvonce.hpp"

namespace kvonce::conformance {

struct CaseResult {
  enum Status { passed, failed, skipped };

  std::string name;  // states the whole case, so that it can be run again
  Status status = skipped;
  std::string detail;          // failed: what differed; skipped: why it did not run
  std::string kernel_id;       // the kernel that ran; empty when none did
  double rel_rms_error = 0.0;  // against the oracle: rms(out - oracle) / rms(oracle); 0 for exact-answer cases
};

/// How much to run on one target: quick < 15 s, standard < 25 s on 2 cores in a release build; full: minutes.
enum class Level { quick, standard, full };

/// quick with KVONCE_QUICK=1 in the environment, full with KVONCE_NIGHTLY=1, else standard.
Level level_from_environment();

using OnResult = std::function<void(const CaseResult&)>;

/// Sampled problems against the oracle: every pair of (formats, dtypes, groups, heads, dims, lengths, q_len, batch, causal,
/// chunk, threads, strides) that fits the level's cost occurs. Results in order; on_result is called after each case.
std::vector<CaseResult> run_grid(const Device& device, Level level, const OnResult& on_result = {});

/// Inputs whose answer is known without an oracle: uniform counts, needles, head constants, shifts, linearity, ...
std::vector<CaseResult> run_exact(const Device& device, Level level, const OnResult& on_result = {});

/// run_grid and run_exact on every CPU target; a target that cannot run here gives one skipped result with the reason.
std::vector<CaseResult> run_all(Level level, const OnResult& on_result = {});

}  // namespace kvonce::conformance
