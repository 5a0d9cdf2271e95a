// Which values of the tunables are worth a measurement for a problem.
#pragma once

#include <string>
#include <vector>

#include "kvonce/plan.hpp"

namespace kvonce::tool {

struct Candidate {
  std::string text;                       // "step_tokens=64"
  Policy policy;                          // what is not named is left to make_plan
  std::int64_t Policy::*field = nullptr;  // the tunable; of several, the first
};

/// Neighbours of what make_plan chooses with `built_in`, one tunable each; only those that make_plan accepts and that
/// change something.
std::vector<Candidate> tune_candidates(const Problem& problem, const Device& device, const PlanOptions& built_in);

/// Both settings.
Candidate joined(const Candidate& a, const Candidate& b);

}  // namespace kvonce::tool
