// The tensor-core kernel's instances of one type.
#pragma once

#include "cuda/attend.cuh"
#include "cuda/attend_warpgroup.cuh"
#include "cuda/cuda_plan.hpp"
#include "cuda/kernels.hpp"

namespace kvonce::cuda {

template <typename T, int kDimQk, int kDimV, int kRowTiles, Join kJoin>
const void* general_address() {
  return reinterpret_cast<const void*>(
      &attend_mma<T, kDimQk, kDimV, kRowTiles, step_tiles(kDimQk), is_staged(kDimQk, kDimV), kJoin, false,
                  Known<mma_warps(kDimQk, kDimV), false, void, kRowTiles == 4 ? 2 : 1>>);
}

template <typename T, int kDim, int kRows, Join kJoin>
const void* groups_address() {
  return reinterpret_cast<const void*>(
      &attend_warpgroup<T, kDim, kRows, kJoin, Known<kWarps, false, void, 2, kWarps, true>>);
}

template <typename T, int kDim, Join kJoin, int kTiles, bool kOneStep, int kBlockWarps>
const void* plain_instance() {
  return reinterpret_cast<const void*>(
      &attend_mma<T, kDim, kDim, 1, kTiles, false, kJoin, kOneStep, Known<kBlockWarps, true, T>>);
}

template <typename T, int kDim, Join kJoin>
const void* plain_address(const MmaInstance& choice) {
  if (!choice.one_step) return plain_instance<T, kDim, kJoin, step_tiles(kDim), false, kWarps>();
  if constexpr (kJoin != kJoinFew) {
    if (choice.warps == 4) return plain_instance<T, kDim, kJoin, 2, true, 4>();
    if (choice.step_tiles == 2) return plain_instance<T, kDim, kJoin, 2, true, kWarps>();
    if constexpr (kDim == 64) {
      if (choice.step_tiles == 4) return plain_instance<T, kDim, kJoin, 4, true, kWarps>();
    }
  }
  return nullptr;
}

template <typename T, int kDimQk, int kDimV, Join kJoin>
const void* mma_address_of(const MmaInstance& choice) {
  if constexpr (has_plain(kDimQk, kDimV)) {
    if (choice.plain) return plain_address<T, kDimQk, kJoin>(choice);
  }
  if constexpr (has_groups(kDimQk, kDimV, 8)) {
    if (choice.groups && choice.row_tiles == 4) return groups_address<T, kDimQk, 32, kJoin>();
    if (choice.groups && choice.row_tiles == 8) return groups_address<T, kDimQk, 64, kJoin>();
  }
  if (choice.row_tiles == 1) return general_address<T, kDimQk, kDimV, 1, kJoin>();
  if constexpr (most_row_tiles(kDimQk, kDimV) >= 2) {
    if (choice.row_tiles == 2) return general_address<T, kDimQk, kDimV, 2, kJoin>();
  }
  if constexpr (most_row_tiles(kDimQk, kDimV) >= 4) {
    if (choice.row_tiles == 4) return general_address<T, kDimQk, kDimV, 4, kJoin>();
  }
  return nullptr;
}

template <typename T, int kDimQk, int kDimV>
const void* mma_address_of(const MmaInstance& choice) {
  switch (choice.join) {
    case kJoinCluster:
      return mma_address_of<T, kDimQk, kDimV, kJoinCluster>(choice);
    case kJoinFew:
      return mma_address_of<T, kDimQk, kDimV, kJoinFew>(choice);
    default:
      return mma_address_of<T, kDimQk, kDimV, kJoinWorkspace>(choice);
  }
}

template <typename T>
const void* mma_address(const MmaInstance& choice) {
#define KVONCE_CUDA_DIMS(qk, v) \
  if (choice.head_dim_qk == (qk) && choice.head_dim_v == (v)) return mma_address_of<T, qk, v>(choice);
#include "cuda/instances.def"
  return nullptr;
}

}  // namespace kvonce::cuda
