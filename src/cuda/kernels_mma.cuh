// The tensor-core kernel's instances of one type.
#pragma once

#include "cuda/attend.cuh"
#include "cuda/cuda_plan.hpp"
#include "cuda/kernels.hpp"

namespace kvonce::cuda {

template <typename T, int kDimQk, int kDimV, Join kJoin>
const void* mma_address_of(int row_tiles) {
  // Enough bytes in flight take 32 tokens a step where rows are short: 64 KB of K and V for the 8 warps of a block.
  // H200, 64q/8kv d64, 131,072 tokens: 73.3 us with 16 tokens, 66.6 us with 32.
  constexpr int kTokenTiles = kDimQk <= 64 ? 2 : 1;
  if (row_tiles == 1)
    return reinterpret_cast<const void*>(&attend_mma<T, kDimQk, kDimV, 1, kTokenTiles, kJoin, kWarps>);
  if constexpr (kDimQk <= kWideMmaDim) {
    if (row_tiles == 2) {
      return reinterpret_cast<const void*>(&attend_mma<T, kDimQk, kDimV, 2, kTokenTiles, kJoin, kWarps>);
    }
  }
  return nullptr;
}

template <typename T>
const void* mma_address(Join join, int head_dim_qk, int head_dim_v, int row_tiles) {
#define KVONCE_CUDA_DIMS(qk, v)                                                        \
  if (head_dim_qk == (qk) && head_dim_v == (v)) {                                      \
    return join == kJoinCluster ? mma_address_of<T, qk, v, kJoinCluster>(row_tiles)    \
                                : mma_address_of<T, qk, v, kJoinWorkspace>(row_tiles); \
  }
#include "cuda/instances.def"
  return nullptr;
}

}  // namespace kvonce::cuda
