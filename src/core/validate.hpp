// The rules. One message per rule: the argument, what was given, what is allowed.
#pragma once

#include "kvonce/attend.hpp"
#include "kvonce/problem.hpp"

namespace kvonce::core {

/// Returns the problem with head_dim_v and scale resolved. Throws Error{InvalidArgument}.
Problem validate(const Problem& problem);

/// Pointers against a resolved problem. Throws Error{InvalidArgument}; reads through no pointer.
void validate_inputs(const Problem& problem, const Inputs& inputs);
/// kv_lens, kv_starts, the block table and the segments, which it reads: for a host that can.
void validate_lengths(const Problem& problem, const Inputs& inputs);
/// The most that a length may be, and every length where kv_lens is null.
inline std::int64_t most_tokens(const Problem& problem, const Inputs& inputs) {
  return inputs.kv_len < 0 ? problem.max_kv_len : inputs.kv_len;
}
void validate_outputs(const Problem& problem, const Outputs& outputs);

}  // namespace kvonce::core
