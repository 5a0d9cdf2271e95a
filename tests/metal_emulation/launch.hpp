// What a launcher does: parameters from the problem, grid, threadgroup memory, partials, merge.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "kernels.hpp"
#include "kvonce/attend.hpp"
#include "lanes.hpp"
#include "metal/params.h"

namespace kvonce::emulation {

/// What a policy decides.
struct Choice {
  Body body = Body::vector;
  std::int64_t row_tile = 8;
  std::int64_t row_tiles = 1;
  std::int64_t token_parts = 1;
  std::int64_t num_chunks = 1;
  std::int64_t chunk_tokens = 0;
  std::int64_t merge_simdgroups = 4;
  std::uint64_t order_seed = 1;  // of the lanes

  [[nodiscard]] std::string name() const;
};

/// Strides of a tensor in the order sequence, head, token, dim.
using Strides = std::array<std::int64_t, 4>;

/// The launch of a problem: everything but memory.
struct Launch {
  const AttendKernel* attend;
  const MergeKernel* merge;
  std::array<std::int64_t, kvonce_metal::kNumParams> params;
  std::array<float, kvonce_metal::kNumScalars> scalars;
  Strides q_strides, k_strides, v_strides, mask_strides;
  std::int64_t num_rows;  // num_seqs * num_q_heads * q_len
  std::int64_t grid_x, grid_y, grid_z;
  std::int64_t num_simdgroups;  // of a threadgroup
  std::int64_t shared_floats;
  std::int64_t merge_simdgroups;
  std::int64_t merge_shared_floats;
  std::int64_t read_factor;
};

/// Empty, or why the Metal bodies do not serve the problem.
std::string why_not_served(const Problem& problem);

/// Throws Error{InvalidArgument} where the choice breaks a limit of params.h, Error{Unsupported} where no instance is compiled.
/// `dim_stride` of K and V may be set in the result's strides.
Launch make_launch(const Problem& problem, const Inputs& inputs, const Choice& choice);

/// Runs attend_* and merge_partials over the grid, threadgroup by threadgroup. out: [num_seqs, num_q_heads, q_len, head_dim_v]
/// packed; lse: [num_seqs, num_q_heads, q_len]. Partials and threadgroup memory start as NaN and end at an unmapped page.
/// attend_counts: what attend_* executed. Returns what was written outside its place, or an empty string.
std::string run_launch(const Launch& launch, const Inputs& inputs, std::uint64_t order_seed, void* out, float* lse,
                       Counts* attend_counts = nullptr);

}  // namespace kvonce::emulation
