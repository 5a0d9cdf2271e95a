// What a plan of this backend holds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/plan_data.hpp"
#include "cuda/params.hpp"

namespace kvonce::cuda {

/// Threads of a block. 8 warps: kernels.md's prototype was slower with 12 and 16 (mostly), and as fast with 4 only at 2K.
constexpr int kWarps = 8;

/// The most rows that one block of the tensor-core kernel takes, by output dims: what the registers hold without spilling.
constexpr std::int64_t kMmaRows = 8;       // of one row tile
constexpr std::int64_t kWideMmaDim = 128;  // two row tiles up to here

/// How one kernel is launched for a problem.
struct LaunchShape {
  bool exists = false;
  std::int32_t rows_per_block = 0;
  std::int32_t row_blocks = 0;
  std::int32_t num_splits = 0;
  std::int32_t split_tokens = 0;
  std::int32_t join_blocks = 1;
  Join join = kJoinWorkspace;
};

struct CudaPlan : core::BackendPlan {
  LaunchShape mma;      // where the tensor-core kernel serves the problem and the tensors are aligned to 16 bytes
  LaunchShape generic;  // everywhere else
  // Byte offsets from the workspace's 256-byte aligned base.
  std::size_t tickets = 0;
  std::size_t partial_ml = 0;
  std::size_t partial_o = 0;
  std::size_t end = 0;
};

}  // namespace kvonce::cuda
