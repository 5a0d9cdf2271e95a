// One pass over K and V on the tensor cores: bf16 and f16, up to 16 rows per block.
//
// Scores are computed transposed, S^T = K q^T, with 16 tokens as M and 8 rows as N of mma.m16n8k16, and so is the output,
// O^T = V^T P^T, with 16 dims as M: eight rows cost what one costs, and a row's maximum, sum and outputs stay in the same
// lanes. The k index of a product may be permuted if both sides agree, so a lane loads 16 neighbouring bytes of K straight
// from memory into its operands; V needs pairs of tokens in a register, which two byte permutations make.
//
// A lane is (g, t) = (lane / 4, lane % 4). It holds q rows 2t and 2t + 1 of the scores and of the output.
#pragma once

#include "cuda/merge.cuh"
#include "cuda/params.hpp"
#include "cuda/ptx.cuh"
#include "cuda/work.cuh"

namespace kvonce::cuda {

/// Dims are multiples of 16. K goes in parts of 32 dims, V in parts of 64; what is left takes shorter loads.
template <typename T, int kDimQk, int kDimV, int kRowTiles>
struct Tile {
  static constexpr int kPartsK = kDimQk / 32;
  static constexpr bool kHalfK = kDimQk % 32 != 0;
  static constexpr int kPartsV = kDimV / 64;
  static constexpr bool kHalfV = kDimV % 64 >= 32;
  static constexpr bool kQuarterV = kDimV % 32 != 0;
  static constexpr int kOutTiles = kDimV / 16;

  // K: tokens g and g + 8. V: tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  uint4 k[2][kPartsK > 0 ? kPartsK : 1];
  uint2 k_half[2];
  uint4 v[4][kPartsV > 0 ? kPartsV : 1];
  uint2 v_half[4];
  std::uint32_t v_quarter[4];

  uint4 q[kRowTiles][kPartsK > 0 ? kPartsK : 1];
  uint2 q_half[kRowTiles];

  float p[kRowTiles][4];  // scores, then probabilities: (token g, row 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
  float m[kRowTiles][2];  // running maximum, log2
  float l[kRowTiles][2];  // this lane's part of the sum
  float o[kRowTiles][kOutTiles][4];

  const T* k_base;
  const T* v_base;
  int g;
  int t;

  /// [1] q of the block's rows; rows past the last are zero.
  __device__ __forceinline__ void load_row_tile(const AttendParams& params, const BlockWork& w) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = n * 8 + g;
      const bool has_row = row < w.num_rows;
      const RowPlace place = place_of(params, w, has_row ? row : 0);
      const T* const from = static_cast<const T*>(params.q.data) + w.seq * params.q.seq + place.head * params.q.head +
                            place.query * params.q.token;
#pragma unroll
      for (int part = 0; part < kPartsK; ++part) {
        q[n][part] = has_row ? load_late(from + 32 * part + 8 * t) : uint4{0, 0, 0, 0};
      }
      if constexpr (kHalfK) q_half[n] = has_row ? load_late_8(from + 32 * kPartsK + 4 * t) : uint2{0, 0};
    }
  }

  // Tokens past the last are read as the last one: their probabilities are zero, and their bytes are valid.
  __device__ __forceinline__ void load_keys(const AttendParams& params, int token, int end) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T* const from = k_base + min(token + g + 8 * i, end - 1) * params.k.token;
#pragma unroll
      for (int part = 0; part < kPartsK; ++part) k[i][part] = load_stream(from + 32 * part + 8 * t);
      if constexpr (kHalfK) k_half[i] = load_stream_8(from + 32 * kPartsK + 4 * t);
    }
  }

  __device__ __forceinline__ void load_values(const AttendParams& params, int token, int end) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* const from = v_base + min(token + 2 * t + (i & 1) + (i >> 1) * 8, end - 1) * params.v.token;
#pragma unroll
      for (int part = 0; part < kPartsV; ++part) v[i][part] = load_stream(from + 64 * part + 8 * g);
      if constexpr (kHalfV) v_half[i] = load_stream_8(from + 64 * kPartsV + 4 * g);
      if constexpr (kQuarterV) v_quarter[i] = load_stream_4(from + kDimV - 16 + 2 * g);
    }
  }

  /// [2] Scaled scores (log2) of 16 tokens.
  __device__ __forceinline__ void score_tokens(float scale_log2) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      float even[4] = {0.0F, 0.0F, 0.0F, 0.0F};
      float odd[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
      for (int part = 0; part < kPartsK; ++part) {
        const uint4 a = k[0][part];
        const uint4 b = k[1][part];
        mma(even, a.x, b.x, a.y, b.y, q[n][part].x, q[n][part].y, T());
        mma(odd, a.z, b.z, a.w, b.w, q[n][part].z, q[n][part].w, T());
      }
      if constexpr (kHalfK) mma(even, k_half[0].x, k_half[1].x, k_half[0].y, k_half[1].y, q_half[n].x, q_half[n].y, T());
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = (even[i] + odd[i]) * scale_log2;
    }
  }

  /// Hides the tokens that a row does not see.
  __device__ __forceinline__ void hide_tokens(const AttendParams& params, const BlockWork& w, int token) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const RowRange range = range_of(params, w, n * 8 + 2 * t + j);
        if (token + g < range.begin || token + g >= range.end) p[n][j] = -INFINITY;
        if (token + g + 8 < range.begin || token + g + 8 >= range.end) p[n][2 + j] = -INFINITY;
      }
    }
  }

  /// [3] Running maximum and probabilities. Rescales only when some row has a new maximum.
  __device__ __forceinline__ void update_softmax() {
    float high[kRowTiles][2];
    bool grows = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        high[n][j] = fmaxf(p[n][j], p[n][2 + j]);
        grows = grows || high[n][j] > m[n][j];
      }
    }
    if (__any_sync(kAllLanes, grows)) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int step = 4; step < 32; step *= 2) {
            high[n][j] = fmaxf(high[n][j], __shfl_xor_sync(kAllLanes, high[n][j], step));
          }
          const float now = fmaxf(m[n][j], high[n][j]);
          const float f = exp2_approx(m[n][j] - now);
          m[n][j] = now;
          l[n][j] *= f;
#pragma unroll
          for (int i = 0; i < kOutTiles; ++i) {
            o[n][i][j] *= f;
            o[n][i][2 + j] *= f;
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = exp2_approx(p[n][i] - m[n][i & 1]);
      l[n][0] += p[n][0] + p[n][2];
      l[n][1] += p[n][1] + p[n][3];
    }
  }

  // One product: the words hold dims (a, a + 1) of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  __device__ __forceinline__ void accumulate_pair(int out_tile, std::uint32_t v0, std::uint32_t v1, std::uint32_t v2,
                                                  std::uint32_t v3, const std::uint32_t (&low)[kRowTiles],
                                                  const std::uint32_t (&high)[kRowTiles]) {
    const std::uint32_t a0 = __byte_perm(v0, v1, 0x5410);
    const std::uint32_t a1 = __byte_perm(v0, v1, 0x7632);
    const std::uint32_t a2 = __byte_perm(v2, v3, 0x5410);
    const std::uint32_t a3 = __byte_perm(v2, v3, 0x7632);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) mma(o[n][out_tile], a0, a1, a2, a3, low[n], high[n], T());
  }

  /// [4] Adds 16 tokens' values.
  __device__ __forceinline__ void accumulate_values() {
    std::uint32_t low[kRowTiles];
    std::uint32_t high[kRowTiles];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      low[n] = transpose_8x8(pack(p[n][0], p[n][1], T()));
      high[n] = transpose_8x8(pack(p[n][2], p[n][3], T()));
    }
#pragma unroll
    for (int part = 0; part < kPartsV; ++part) {
      accumulate_pair(4 * part + 0, v[0][part].x, v[1][part].x, v[2][part].x, v[3][part].x, low, high);
      accumulate_pair(4 * part + 1, v[0][part].y, v[1][part].y, v[2][part].y, v[3][part].y, low, high);
      accumulate_pair(4 * part + 2, v[0][part].z, v[1][part].z, v[2][part].z, v[3][part].z, low, high);
      accumulate_pair(4 * part + 3, v[0][part].w, v[1][part].w, v[2][part].w, v[3][part].w, low, high);
    }
    if constexpr (kHalfV) {
      accumulate_pair(4 * kPartsV + 0, v_half[0].x, v_half[1].x, v_half[2].x, v_half[3].x, low, high);
      accumulate_pair(4 * kPartsV + 1, v_half[0].y, v_half[1].y, v_half[2].y, v_half[3].y, low, high);
    }
    if constexpr (kQuarterV) accumulate_pair(kOutTiles - 1, v_quarter[0], v_quarter[1], v_quarter[2], v_quarter[3], low, high);
  }

  // The first of the two neighbouring dims that out_tile's fragment holds for this lane.
  __device__ __forceinline__ int dim_of(int out_tile) const {
    if (out_tile < 4 * kPartsV) return 64 * (out_tile / 4) + 8 * g + 2 * (out_tile % 4);
    if (kHalfV && out_tile < 4 * kPartsV + 2) return 64 * kPartsV + 4 * g + 2 * (out_tile - 4 * kPartsV);
    return kDimV - 16 + 2 * g;
  }

  /// [5] This warp's partial to shared memory.
  __device__ __forceinline__ void store_partial(const MergeArea& area, int warp) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) l[n][j] += __shfl_xor_sync(kAllLanes, l[n][j], step);
        const int row = n * 8 + 2 * t + j;
        if (row >= area.rows) continue;
        if (g == 0) area.ml[warp * area.rows + row] = make_float2(m[n][j], l[n][j]);
#pragma unroll
        for (int i = 0; i < kOutTiles; ++i) *area.pair(warp, row, dim_of(i)) = make_float2(o[n][i][j], o[n][i][2 + j]);
      }
    }
  }
};

template <typename T, int kDimQk, int kDimV, int kRowTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) attend_mma(const __grid_constant__ AttendParams params) {
  const bool in_cluster = params.join == kJoinCluster;
  if (in_cluster) cluster_arrive_relaxed();
  launch_dependents();
  const BlockWork w = find_work(params);
  if (w.split >= w.num_splits) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  Tile<T, kDimQk, kDimV, kRowTiles> tile;
  tile.g = static_cast<int>(threadIdx.x) % 32 / 4;
  tile.t = static_cast<int>(threadIdx.x) % 4;
  tile.k_base = static_cast<const T*>(params.k.data) + w.seq * params.k.seq + w.kv_head * params.k.head;
  tile.v_base = static_cast<const T*>(params.v.data) + w.seq * params.v.seq + w.kv_head * params.v.head;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    tile.m[n][0] = tile.m[n][1] = kNoMax;
    tile.l[n][0] = tile.l[n][1] = 0.0F;
#pragma unroll
    for (int i = 0; i < kDimV / 16; ++i) {
      tile.o[n][i][0] = tile.o[n][i][1] = tile.o[n][i][2] = tile.o[n][i][3] = 0.0F;
    }
  }

  // The warps take the block's tiles in turn. Loads of the first go out before anything else is waited for.
  int at = w.tile_begin + warp;
  int token = w.begin + at * kTileTokens;
  bool has_tile = at < w.tile_end;
  const bool early = params.earlier_kv_ready && token + kTileTokens <= w.kv_len - params.q_len;
  if (has_tile && early) {
    tile.load_keys(params, token, w.end);
    tile.load_values(params, token, w.end);
  }
  wait_for_preceding();
  if (has_tile && !early) {
    tile.load_keys(params, token, w.end);
    tile.load_values(params, token, w.end);
  }
  tile.load_row_tile(params, w);
  __shared__ int shared_ticket;
  if (threadIdx.x == 0) shared_ticket = take_ticket(params, w);

  const bool rows_differ = params.q_len > 1 && (params.causal || params.window > 0);
  while (has_tile) {
    at += kWarps;
    const int next = w.begin + at * kTileTokens;
    const bool has_next = at < w.tile_end;
    tile.score_tokens(params.scale_log2);
    if (has_next) tile.load_keys(params, next, w.end);
    if (rows_differ || token + kTileTokens > w.end) tile.hide_tokens(params, w, token);
    tile.update_softmax();
    tile.accumulate_values();
    if (has_next) tile.load_values(params, next, w.end);
    token = next;
    has_tile = has_next;
  }

  const MergeArea area = lay_out_area<kWarps>(params, w, kDimV);
  tile.store_partial(area, warp);
  __syncthreads();
  merge_block<kWarps>(params, w, area, kDimV / 4, shared_ticket);
}

}  // namespace kvonce::cuda
