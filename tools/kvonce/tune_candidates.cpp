#include "kvonce/tune_candidates.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/policy_fields.hpp"
#include "shared/token_range.h"

namespace kvonce::tool {

std::vector<Candidate> tune_candidates(const Problem& problem, const Device& device, const PlanOptions& built_in) {
  const Plan plan = make_plan(problem, device, built_in);
  const Policy& chosen = plan.policy();
  std::vector<Candidate> candidates;
  const auto add = [&](std::int64_t Policy::*field, std::int64_t value) {
    PlanOptions options = built_in;
    options.policy.*field = value;
    try {
      if (to_string(make_plan(problem, device, options).policy()) == to_string(chosen)) return;
    } catch (const Error&) {
      return;  // beyond what the target or the formats allow
    }
    const auto* const named = std::find_if(std::begin(core::kPolicyFields), std::end(core::kPolicyFields),
                                           [field](const core::PolicyField& f) { return f.member == field; });
    candidates.push_back({fmt::format("{}={}", named->name, value), options.policy, field});
  };

  // Two row tiles that cut the rows otherwise; which rows share a tile is all that differs between equal cuts.
  const std::int64_t rows = std::min(problem.rows_per_stream(), chosen.rows_per_worker);
  std::int64_t tiles = shared::ceil_div(rows, chosen.row_tile);
  int num_row_tiles = 0;
  for (std::int64_t row_tile = chosen.row_tile; row_tile > 1 && num_row_tiles < 2;) {
    row_tile /= 2;
    if (shared::ceil_div(rows, row_tile) == tiles) continue;
    tiles = shared::ceil_div(rows, row_tile);
    add(&Policy::row_tile, row_tile);
    ++num_row_tiles;
  }
  add(&Policy::chunk_tokens, chosen.chunk_tokens / 2);
  add(&Policy::chunk_tokens, chosen.chunk_tokens * 2);
  add(&Policy::step_tokens, chosen.step_tokens / 2);
  add(&Policy::step_tokens, chosen.step_tokens * 2);
  add(&Policy::prefetch_tokens, 0);
  add(&Policy::prefetch_tokens, chosen.step_tokens * 2);
  add(&Policy::prefetch_lines, 3 - chosen.prefetch_lines);
  add(&Policy::prefetch_level, 3 - chosen.prefetch_level);
  // Not 2 where it was not chosen: it rounds the weights, and a rule does not know the output's type.
  for (const std::int64_t pair_dot : {0, 1}) add(&Policy::pair_dot, pair_dot);
  // Where another limit wakes another number of threads: short cases only.
  const auto num_workers = [&](std::int64_t worker_bytes) {
    return std::min<std::int64_t>(device.num_threads, plan.max_kv_bytes() / worker_bytes + 1);
  };
  for (const std::int64_t worker_bytes : {chosen.worker_bytes / 2, chosen.worker_bytes * 2}) {
    if (num_workers(worker_bytes) != num_workers(chosen.worker_bytes)) add(&Policy::worker_bytes, worker_bytes);
  }
  return candidates;
}

Candidate joined(const Candidate& a, const Candidate& b) {
  Candidate both = a;
  both.text += "," + b.text;
  for (const core::PolicyField& field : core::kPolicyFields) {
    if (b.policy.*field.member != field.choose) both.policy.*field.member = b.policy.*field.member;
  }
  return both;
}

}  // namespace kvonce::tool
