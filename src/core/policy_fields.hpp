// The fields of Policy by name: one list for parsing, printing, files and precedence.
#pragma once

#include <cstdint>

#include "kvonce/plan.hpp"

namespace kvonce::core {

struct PolicyField {
  const char* name;
  std::int64_t Policy::*member;
  std::int64_t choose;  // the value that leaves the choice to make_plan, and the lowest allowed
};

inline constexpr PolicyField kPolicyFields[] = {
    {"row_tile", &Policy::row_tile, 0},
    {"rows_per_worker", &Policy::rows_per_worker, 0},
    {"chunk_tokens", &Policy::chunk_tokens, 0},
    {"step_tokens", &Policy::step_tokens, 0},
    {"prefetch_tokens", &Policy::prefetch_tokens, -1},
    {"prefetch_lines", &Policy::prefetch_lines, 0},
    {"pair_dot", &Policy::pair_dot, -1},
    {"worker_bytes", &Policy::worker_bytes, 0},
    {"prefetch_level", &Policy::prefetch_level, 0},
    {"heads_per_step", &Policy::heads_per_step, 0},
    {"splits", &Policy::splits, 0},
    {"cluster", &Policy::cluster, -1},
    {"join_blocks", &Policy::join_blocks, 0},
    {"body", &Policy::body, 0},
    {"simdgroups", &Policy::simdgroups, 0},
};

}  // namespace kvonce::core
