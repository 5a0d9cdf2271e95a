// The oracle: attention in double precision, one row and one key at a time, for every feature in Problem.
#pragma once

#include <cstdint>
#include <vector>

#include "kvonce/attend.hpp"

namespace kvonce::core {

struct ReferenceResult {
  std::vector<double> out;  // [num_seqs, num_q_heads, q_len, head_dim_v], packed
  std::vector<double> lse;  // [num_seqs, num_q_heads, q_len], natural log, -inf for rows without keys
};

/// Serves every combination that validate() accepts, whatever the backends support; reads the inputs as stored (rounded
/// or quantised) and computes in double. A hidden key's K and V are never read. Slow by design: O(rows * kv_len * dims).
ReferenceResult reference_attend(const Problem& problem, const Inputs& inputs);

/// Value `idx` of the row of `format` values that starts at `row` (scales inside the block where the format has them).
/// `scale`/`bias` are used by f8_e4m3 (scale) and the MLX formats.
double decode_value(KvFormat format, const void* row, std::int64_t idx, double scale = 1.0, double bias = 0.0);

}  // namespace kvonce::core
