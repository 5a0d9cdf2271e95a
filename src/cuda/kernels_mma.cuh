// The tensor-core kernel's instances of one type.
#pragma once

#include "cuda/attend.cuh"
#include "cuda/cuda_plan.hpp"
#include "cuda/kernels.hpp"

namespace kvonce::cuda {

template <typename T, int kDimQk, int kDimV>
const void* mma_address_of(int row_tiles) {
  if (row_tiles == 1) return reinterpret_cast<const void*>(&attend_mma<T, kDimQk, kDimV, 1, kWarps>);
  if constexpr (kDimQk <= kWideMmaDim) {
    if (row_tiles == 2) return reinterpret_cast<const void*>(&attend_mma<T, kDimQk, kDimV, 2, kWarps>);
  }
  return nullptr;
}

template <typename T>
const void* mma_address(int head_dim_qk, int head_dim_v, int row_tiles) {
#define KVONCE_CUDA_DIMS(qk, v) \
  if (head_dim_qk == (qk) && head_dim_v == (v)) return mma_address_of<T, qk, v>(row_tiles);
#include "cuda/instances.def"
  return nullptr;
}

}  // namespace kvonce::cuda
