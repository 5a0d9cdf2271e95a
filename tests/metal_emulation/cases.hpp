// Which conformance cases the Metal bodies run, and with which choices.
#pragma once

#include <cstddef>
#include <vector>

#include "case_tensors.hpp"
#include "generator.hpp"
#include "launch.hpp"

namespace kvonce::emulation {

/// Some choice that the limits allow, for a case with this seed. chunk_tokens: the case's, or 0 for even shares.
Choice random_choice(const Problem& problem, std::int64_t longest, std::int64_t chunk_tokens, Body body,
                     std::int64_t row_tile, conformance::Random& random);

/// A choice by the case's seed, with a row tile that is compiled. Throws Error{Unsupported} when none is.
Choice choose(const conformance::CaseSpec& spec, Body body);

/// The case in the types and dims of an instance, without the features that the bodies do not serve; masks and other rules of
/// scores in every second case.
conformance::CaseSpec fit(const conformance::CaseSpec& from, const Instance& instance);

struct GridCase {
  conformance::CaseSpec spec;
  Choice choice;
};

/// Cases of the sampled grid (tools/conformance/grid.hpp) for each instance, the same in every run.
std::vector<GridCase> grid_cases(std::size_t cases_per_instance, double max_cost);

}  // namespace kvonce::emulation
