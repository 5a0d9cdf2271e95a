// The compiled kernels, as addresses for cudaLaunchKernelExC.
#pragma once

#include "cuda/params.hpp"

namespace kvonce::cuda {

/// The tensor-core kernel for a 16-bit type and head dims with one or two tiles of 8 rows; null when it does not exist.
const void* mma_kernel(Element type, Join join, int head_dim_qk, int head_dim_v, int row_tiles);

/// The kernel for anything else with head dims up to `largest_dim`.
const void* generic_kernel(int largest_dim);

/// Fills words [begin, end) of the workspace with kEmptyWord, the tickets and the header.
const void* prepare_kernel();

}  // namespace kvonce::cuda
