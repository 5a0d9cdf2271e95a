// Which tunables a plan is asked for: the caller's, then those of a policy file's rule; the rest is left to the backend.
#pragma once

#include <string>

#include "kvonce/policy_file.hpp"

namespace kvonce::core {

struct PolicyChoice {
  Policy policy;
  std::string origin;                // which fields came from where; empty: no policy file is in use
  const PolicyFile* file = nullptr;  // in use
  const PolicyRule* rule = nullptr;  // of that file, that applies
};

/// The caller's `asked` with its open fields filled from the rule that applies. `file` null: that of KVONCE_POLICY.
/// Throws Error{InvalidArgument} when KVONCE_POLICY names a file that is not one.
PolicyChoice choose_policy(const Policy& asked, const PolicyFile* file, const Problem& problem, const Device& device);

/// A refusal's message, with the file and line when the field that it names was set there.
std::string with_policy_line(const PolicyChoice& choice, const Policy& asked, const std::string& message);

}  // namespace kvonce::core
