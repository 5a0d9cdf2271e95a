// The compiled kernels, as addresses for cudaLaunchKernelExC.
#pragma once

#include "cuda/params.hpp"

namespace kvonce::cuda {

/// Which instance of the tensor-core kernel.
struct MmaChoice {
  Join join;
  int head_dim_qk;
  int head_dim_v;
  int row_tiles;   // of 8 rows: 1, 2 or 4
  bool plain;      // plain decode: Known in partial.cuh
  bool one_step;   // no warp has more than one step; only with plain
  int step_tiles;  // a warp's step, of 16 tokens
  int warps;
};

/// Null when there is no such instance.
const void* mma_kernel_bf16(const MmaChoice& choice);
const void* mma_kernel_f16(const MmaChoice& choice);

/// The kernel for anything else with head dims up to `largest_dim`.
const void* generic_kernel(int largest_dim);

/// Fills words [begin, end) of the workspace with kEmptyWord, the tickets and the header.
const void* prepare_kernel();

}  // namespace kvonce::cuda
