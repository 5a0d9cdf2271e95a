// A launch: run_launch.cpp on the host, on_cuda.cu on an NVIDIA GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lanes.hpp"
#include "launch.hpp"

namespace kvonce::emulation {

/// Memory that the inputs point into, margins included: what has to be where the kernels run.
struct Region {
  const void* begin;
  std::size_t bytes;
};

/// Runs attend_* and merge_partials over the grid, threadgroup by threadgroup. out: [num_seqs, num_q_heads, q_len, head_dim_v]
/// packed; lse: [num_seqs, num_q_heads, q_len]. Partials and threadgroup memory start as NaN and end at an unmapped page.
/// attend_counts: what attend_* executed; regions: not needed on the host. Returns what was written outside its place, or an empty string. Throws
/// Error{Unsupported} for an instance that is not compiled.
std::string run_launch(const Launch& launch, const Inputs& inputs, std::uint64_t order_seed, void* out, float* lse,
                       Counts* attend_counts = nullptr, std::span<const Region> regions = {});

}  // namespace kvonce::emulation
