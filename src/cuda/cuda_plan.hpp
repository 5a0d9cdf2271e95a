// What a plan of this backend holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/plan_data.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"

namespace kvonce::cuda {

/// Threads of a block. 8 warps: kernels.md's prototype was slower with 12 and 16 (mostly), and as fast with 4 only at 2K.
constexpr int kWarps = 8;

constexpr std::int64_t kMmaRows = 8;  // of one row tile

/// Row tiles of a block of the tensor-core kernel at most: what the registers hold without spilling. Four tiles leave none
/// for q, which goes to shared memory in parts of 32 dims.
constexpr int most_row_tiles(int head_dim_qk, int head_dim_v) {
  if (head_dim_qk > 128 || head_dim_v > 128) return 1;
  return head_dim_qk % 32 == 0 ? 4 : 2;
}

/// Head dims whose outputs leave no registers for K and V: those are staged in shared memory, for as many warps as fit.
constexpr bool is_staged(int head_dim_qk, int head_dim_v) { return head_dim_qk > 256 || head_dim_v > 256; }
constexpr int mma_warps(int head_dim_qk, int head_dim_v) { return is_staged(head_dim_qk, head_dim_v) ? 4 : kWarps; }

/// Token tiles of a warp's step. Enough bytes in flight take 32 tokens where rows are short: 64 KB of K and V for the 8 warps
/// of a block. H200, 64q/8kv d64, 131,072 tokens: 73.3 us with 16 tokens, 66.6 us with 32.
constexpr int step_tiles(int head_dim_qk) { return head_dim_qk <= 64 ? 2 : 1; }

/// Head dims that have instances for plain decode (Known in partial.cuh).
constexpr bool has_plain(int head_dim_qk, int head_dim_v) {
  return head_dim_qk == head_dim_v && (head_dim_qk == 64 || head_dim_qk == 128);
}

/// Whether blocks of so many row tiles, 4 or 8, multiply by four warps together (attend_warpgroup.cuh), on sm_90.
constexpr bool has_groups(int head_dim_qk, int head_dim_v, int row_tiles) {
  return row_tiles >= 4 && has_plain(head_dim_qk, head_dim_v);
}

/// One kernel and how it is launched for a problem.
struct KernelShape : LaunchShape {
  bool exists = false;
  // Where every length is max_kv_len and every row sees all of it: AttendParams.
  std::int32_t share_tiles = 0;
  std::int32_t share_rest = 0;
  std::int32_t share_splits = 1;
};

/// The choices that a call's pointers decide between.
struct CudaPlan : core::BackendPlan {
  KernelShape mma;       // where the tensor-core kernel serves the problem and the tensors are aligned to 16 bytes
  MmaInstance instance;  // of it
  std::optional<MmaInstance> plain;  // instead, without kv_starts and where the output is aligned too
  KernelShape generic;               // everywhere else
  // Byte offsets from the workspace's 256-byte aligned base.
  std::size_t tickets = 0;
  std::size_t partial_ml = 0;
  std::size_t partial_o = 0;
  std::size_t end = 0;
};

}  // namespace kvonce::cuda
