// The compiled kernels, as addresses for cudaLaunchKernelExC.
#pragma once

#include "cuda/params.hpp"

namespace kvonce::cuda {

/// Which instance of the tensor-core kernel.
struct MmaInstance {
  Join join = kJoinWorkspace;
  int head_dim_qk = 0;
  int head_dim_v = 0;
  int row_tiles = 1;      // of 8 rows: 1, 2, 4 or, with groups, 8
  bool groups = false;    // four warps together: attend_warpgroup.cuh
  bool plain = false;     // plain decode: Known in partial.cuh
  bool one_step = false;  // no warp has more than one step; only with plain, never with kJoinFew
  int step_tiles = 1;     // a warp's step, of 16 tokens
  int warps = 0;
  int kv_bytes = 0;  // of shared memory for staged K and V

  [[nodiscard]] constexpr int partials() const { return groups ? 2 : warps; }  // of a block
};

/// Null when there is no such instance.
const void* mma_kernel_bf16(const MmaInstance& choice);
const void* mma_kernel_f16(const MmaInstance& choice);

/// The kernel for anything else with head dims up to `largest_dim`.
const void* generic_kernel(int largest_dim);

/// Fills words [begin, end) of the workspace with kEmptyWord, the tickets and the header.
const void* prepare_kernel();

}  // namespace kvonce::cuda
