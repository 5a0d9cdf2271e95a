// K and V of a warp's step of tokens: in registers, as their lanes will multiply them, or staged in shared memory as rows,
// where the outputs of many dims leave no registers for them.
#pragma once

#include "cuda/merge.cuh"
#include "cuda/params.hpp"
#include "cuda/ptx.cuh"

namespace kvonce::cuda {

/// The first row of a head.
template <typename T>
__device__ __forceinline__ const T* first_row(const Rows& rows, int seq, int head) {
  const std::int64_t pieces = static_cast<std::int64_t>(seq) * rows.seq + static_cast<std::int64_t>(head) * rows.head;
  return reinterpret_cast<const T*>(rows.data + 16 * pieces);
}
template <typename T>
__device__ __forceinline__ const T* row_of(const T* first, int row, std::int32_t row_bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(first) + static_cast<std::int64_t>(row) * row_bytes);
}

/// Dims are multiples of 16. K goes in parts of 32 dims, V in parts of 64; what is left takes shorter loads.
/// Lane (g, t) = (lane / 4, lane % 4). K: tokens g and g + 8 of a token tile. V: tokens 2t, 2t + 1, 2t + 8, 2t + 9.
/// kStaged: the warp's part of the shared memory is [tokens] rows of K, then of V, stage_row_bytes() apart.
template <typename T, int kDimQk, int kDimV, int kTokenTiles, bool kStaged>
struct KvTile {
  static constexpr int kPartsK = kDimQk / 32;
  static constexpr bool kHalfK = kDimQk % 32 != 0;
  static constexpr int kPartsV = kDimV / 64;
  static constexpr bool kHalfV = kDimV % 64 >= 32;
  static constexpr bool kQuarterV = kDimV % 32 != 0;
  static constexpr int kTokens = 16 * kTokenTiles;
  static constexpr int kRowK = stage_row_bytes(kDimQk, kKeyPitch);
  static constexpr int kRowV = stage_row_bytes(kDimV, kValuePitch);

  uint4 k[kTokenTiles][2][kPartsK > 0 ? kPartsK : 1];
  uint2 k_half[kTokenTiles][2];
  uint4 v[kTokenTiles][4][kPartsV > 0 ? kPartsV : 1];
  uint2 v_half[kTokenTiles][4];
  std::uint32_t v_quarter[kTokenTiles][4];
  unsigned char* stage;
  std::uint64_t* barriers;  // of K and of V: open when a step's bytes are there
  unsigned parity;          // of the step that is waited for

  const T* k_base;
  const T* v_base;
  int g;
  int t;

  /// block_barriers: two for each warp of the block, staged only.
  __device__ __forceinline__ void open(const AttendParams& params, int seq, int kv_head,
                                       std::uint64_t* block_barriers) {
    const unsigned warp = threadIdx.x / 32;
    g = static_cast<int>(threadIdx.x % 32 / 4);
    t = static_cast<int>(threadIdx.x % 4);
    k_base = first_row<T>(params.k_rows, seq, kv_head);
    v_base = first_row<T>(params.v_rows, seq, kv_head);
    if constexpr (kStaged) {
      stage = shared_bytes + warp * stage_bytes(kDimQk, kDimV, kTokenTiles);
      barriers = block_barriers + 2 * warp;
      parity = 0;
      if (threadIdx.x % 32 < 2) open_barrier(barriers + threadIdx.x % 32);
      __syncwarp();
    }
  }
  __device__ __forceinline__ void wait_for_keys() {
    if constexpr (kStaged) wait_for_bytes(barriers, parity);
  }
  __device__ __forceinline__ void wait_for_values() {
    if constexpr (kStaged) {
      wait_for_bytes(barriers + 1, parity);
      parity ^= 1U;
    }
  }

  // Tokens past the last are read as the last one: their probabilities are zero, and their bytes are valid.
  __device__ __forceinline__ void load_keys(const AttendParams& params, int token, int end) {
    if constexpr (kStaged) {
      copy_rows<2 * kDimQk, kRowK>(k_base, params.k_rows.token, token, end, stage, barriers);
    } else {
#pragma unroll
      for (int s = 0; s < kTokenTiles; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const T* const from = row_of(k_base, min(token + 16 * s + g + 8 * i, end - 1), params.k_rows.token);
#pragma unroll
          for (int part = 0; part < kPartsK; ++part) k[s][i][part] = load_stream<uint4>(from + 32 * part + 8 * t);
          if constexpr (kHalfK) k_half[s][i] = load_stream<uint2>(from + 32 * kPartsK + 4 * t);
        }
      }
    }
  }
  __device__ __forceinline__ void load_values(const AttendParams& params, int token, int end) {
    if constexpr (kStaged) {
      copy_rows<2 * kDimV, kRowV>(v_base, params.v_rows.token, token, end, stage + kTokens * kRowK, barriers + 1);
    } else {
#pragma unroll
      for (int s = 0; s < kTokenTiles; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const T* const from =
              row_of(v_base, min(token + 16 * s + 2 * t + (i & 1) + (i >> 1) * 8, end - 1), params.v_rows.token);
#pragma unroll
          for (int part = 0; part < kPartsV; ++part) v[s][i][part] = load_stream<uint4>(from + 64 * part + 8 * g);
          if constexpr (kHalfV) v_half[s][i] = load_stream<uint2>(from + 64 * kPartsV + 4 * g);
          if constexpr (kQuarterV) v_quarter[s][i] = load_stream<std::uint32_t>(from + kDimV - 16 + 2 * g);
        }
      }
    }
  }

  __device__ __forceinline__ uint4 key(int s, int i, int part) const {
    return held(k[s][i][part], (16 * s + g + 8 * i) * kRowK + 64 * part + 16 * t);
  }
  __device__ __forceinline__ uint2 key_half(int s, int i) const {
    return held(k_half[s][i], (16 * s + g + 8 * i) * kRowK + 64 * kPartsK + 8 * t);
  }

  // Calls each(out_tile, words): of V's dims (a, a + 1), tokens 2t, 2t + 1, 2t + 8 and 2t + 9.
  template <class Each>
  __device__ __forceinline__ void for_values(int s, const Each& each) const {
    const auto row = [&](int i) { return kTokens * kRowK + (16 * s + 2 * t + (i & 1) + (i >> 1) * 8) * kRowV; };
#pragma unroll
    for (int part = 0; part < kPartsV; ++part) {
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = held(v[s][i][part], row(i) + 128 * part + 16 * g);
      each(4 * part + 0, x[0].x, x[1].x, x[2].x, x[3].x);
      each(4 * part + 1, x[0].y, x[1].y, x[2].y, x[3].y);
      each(4 * part + 2, x[0].z, x[1].z, x[2].z, x[3].z);
      each(4 * part + 3, x[0].w, x[1].w, x[2].w, x[3].w);
    }
    if constexpr (kHalfV) {
      uint2 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = held(v_half[s][i], row(i) + 128 * kPartsV + 8 * g);
      each(4 * kPartsV + 0, x[0].x, x[1].x, x[2].x, x[3].x);
      each(4 * kPartsV + 1, x[0].y, x[1].y, x[2].y, x[3].y);
    }
    if constexpr (kQuarterV) {
      std::uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = held(v_quarter[s][i], row(i) + 2 * kDimV - 32 + 4 * g);
      each(kDimV / 16 - 1, x[0], x[1], x[2], x[3]);
    }
  }

 private:
  // Every lane has read what stands there.
  template <int kBytes, int kPitch>
  static __device__ __forceinline__ void copy_rows(const T* base, std::int32_t row_bytes, int token, int end,
                                                   unsigned char* to, std::uint64_t* barrier) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    __syncwarp();
    if (lane == 0) expect_more_bytes(barrier, kBytes * kTokens);
    __syncwarp();
    if (lane < kTokens)
      copy_bytes<kBytes>(to + lane * kPitch, row_of(base, min(token + lane, end - 1), row_bytes), barrier);
  }
  template <typename Words>
  __device__ __forceinline__ Words held(const Words& words, int at) const {
    if constexpr (kStaged) {
      return *reinterpret_cast<const Words*>(stage + at);
    } else {
      return words;
    }
  }
};

}  // namespace kvonce::cuda
