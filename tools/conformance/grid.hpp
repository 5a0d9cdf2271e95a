// The sampled grid: which cases there are.
#pragma once

#include <cstdint>
#include <vector>

#include "case_tensors.hpp"
#include "conformance.hpp"

namespace kvonce::conformance {

struct GridLimits {
  std::uint64_t seed;     // same seed, same cases
  std::size_t max_cases;  // stop here even when pairs are left
  double max_cost;        // of one case: tokens * KV heads * dims * (rows + 8), about a nanosecond each
};

GridLimits grid_limits(Level level, std::uint64_t seed);

/// Cases in which every pair of factor levels that fits max_cost occurs at least once, unless max_cases comes first.
std::vector<CaseSpec> grid_cases(const GridLimits& limits);

/// The case with masks, softcap, ALiBi or sinks that its seed chooses.
CaseSpec with_score_rules(const CaseSpec& plain);

/// The case with block formats for K, V or both and head dims of whole blocks.
CaseSpec with_block_formats(const CaseSpec& plain);

/// The case with MLX's formats for K, V or both, of a group size and a dtype of scales that its seed chooses, and head dims of
/// whole groups.
CaseSpec with_affine_formats(const CaseSpec& plain);

}  // namespace kvonce::conformance
