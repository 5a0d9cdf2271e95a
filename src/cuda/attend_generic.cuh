// One pass over K and V on the CUDA cores: float32, mixed formats, any head dims up to 1024, any alignment.
//
// A lane holds dims 4 * lane + 128 * j of every row of the tile. A warp takes up to four tokens at a time: it adds up the
// rows' products over the lanes by exchanging halves, so that in the end each lane owns the score of one (token, row) pair.
#pragma once

#include "cuda/join_workspace.cuh"
#include "cuda/params.hpp"
#include "cuda/ptx.cuh"
#include "cuda/work.cuh"
#include "kvonce/cuda.cuh"

namespace kvonce::cuda {

/// Four elements of any type from `at` on, zeros unless `exist`. `vector`: they are aligned to their size.
template <bool kLate>
__device__ __forceinline__ float4 load_four(const void* data, Element type, std::int64_t at, bool exist, bool vector) {
  if (!exist) return {0.0F, 0.0F, 0.0F, 0.0F};
  if (type == kF32) {
    const float* const from = static_cast<const float*>(data) + at;
    if (vector) {
      const uint4 bits = kLate ? load_late(from) : load_stream<uint4>(from);
      return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
    }
    return {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2), __ldcg(from + 3)};
  }
  const std::uint16_t* const from = static_cast<const std::uint16_t*>(data) + at;
  std::uint32_t low;
  std::uint32_t high;
  if (vector) {
    const uint2 bits = kLate ? load_late_8(from) : load_stream<uint2>(from);
    low = bits.x;
    high = bits.y;
  } else {
    low = __ldcg(from) | static_cast<std::uint32_t>(__ldcg(from + 1)) << 16;
    high = __ldcg(from + 2) | static_cast<std::uint32_t>(__ldcg(from + 3)) << 16;
  }
  if (type == kBf16) {
    return {__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000U), __uint_as_float(high << 16),
            __uint_as_float(high & 0xffff0000U)};
  }
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&low));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&high));
  return {a.x, a.y, b.x, b.y};
}

__device__ __forceinline__ float dot4(const float4& a, const float4& b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}
__device__ __forceinline__ void add_scaled(float4& sum, float p, const float4& v) {
  sum.x = fmaf(p, v.x, sum.x);
  sum.y = fmaf(p, v.y, sum.y);
  sum.z = fmaf(p, v.z, sum.z);
  sum.w = fmaf(p, v.w, sum.w);
}

/// kRows rows (a power of two up to 8) of up to 128 * kParts dims.
template <int kRows, int kParts>
struct GenericTile {
  static constexpr int kTokens = kParts <= 2 ? 4 : 8 / kParts;  // a step
  static constexpr int kPairs = kTokens * kRows;                // (token, row) pairs, at most 32
  static constexpr int kLanesPerPair = 32 / kPairs;

  float4 q[kRows][kParts];
  float4 k[kTokens][kParts];
  float4 v[kTokens][kParts];
  float4 o[kRows][kParts];
  float m = kNoMax;  // of row lane_row(), the same in its lanes
  float l = 0.0F;    // this lane's part of the sum
  float p = 0.0F;    // score, then probability of pair lane_pair()

  std::int64_t k_base;
  std::int64_t v_base;
  int lane;

  // Pair = token * kRows + row; its lanes are neighbours.
  __device__ __forceinline__ int lane_pair() const { return lane / kLanesPerPair; }
  __device__ __forceinline__ int lane_row() const { return lane_pair() % kRows; }
  __device__ __forceinline__ int lane_token() const { return lane_pair() / kRows; }
  __device__ __forceinline__ int dim(int part) const { return 4 * lane + 128 * part; }

  /// [1] q of the block's rows, scaled; rows past the last are zero.
  __device__ __forceinline__ void load_row_tile(const AttendParams& params, const BlockWork& w) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowPlace place = place_of<false>(params, w, min(r, w.num_rows - 1));
      const std::int64_t at = w.seq * params.q.seq + place.head * params.q.head + place.query * params.q.token;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const bool exist = r < w.num_rows && dim(part) < params.head_dim_qk;
        q[r][part] = load_four<true>(params.q.data, params.q_type, at + dim(part), exist, false);
      }
    }
  }

  // Tokens past the last are read as the last one: their probabilities are zero, and their bytes are valid.
  __device__ __forceinline__ void load_keys(const AttendParams& params, int token, int end) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const std::int64_t at = k_base + min(token + i, end - 1) * params.k.token;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        k[i][part] = load_four<false>(params.k.data, params.k_type, at + dim(part), dim(part) < params.head_dim_qk,
                                      params.vector_kv);
      }
    }
  }
  __device__ __forceinline__ void load_values(const AttendParams& params, int token, int end) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const std::int64_t at = v_base + min(token + i, end - 1) * params.v.token;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        v[i][part] = load_four<false>(params.v.data, params.v_type, at + dim(part), dim(part) < params.head_dim_v,
                                      params.vector_kv);
      }
    }
  }

  /// [2] The scaled score (log2) of this lane's pair: lanes halve the pairs they hold until one is left.
  __device__ __forceinline__ void score_tokens(float scale_log2) {
    float sums[kPairs];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float sum = 0.0F;
#pragma unroll
        for (int part = 0; part < kParts; ++part) sum = dot4(q[r][part], k[i][part], sum);
        sums[i * kRows + r] = sum;
      }
    }
    // Of the pairs it holds a lane keeps the upper half when its bit is set, and gives the other half away.
#pragma unroll
    for (int level = 1; (kPairs >> level) > 0; ++level) {
      const int half = kPairs >> level;
      const int distance = half * kLanesPerPair;
      const bool upper = (lane & distance) != 0;
#pragma unroll
      for (int i = 0; i < kPairs / 2; ++i) {
        if (i >= half) continue;
        const float given = upper ? sums[i] : sums[i + half];
        const float kept = upper ? sums[i + half] : sums[i];
        sums[i] = kept + __shfl_xor_sync(kAllLanes, given, distance);
      }
    }
#pragma unroll
    for (int distance = kLanesPerPair / 2; distance > 0; distance /= 2) {
      sums[0] += __shfl_xor_sync(kAllLanes, sums[0], distance);
    }
    p = sums[0] * scale_log2;
  }

  /// Hides this lane's token where its row does not see it.
  __device__ __forceinline__ void hide_tokens(const RowRange& range, int token) {
    const int mine = token + lane_token();
    if (mine < range.begin || mine >= range.end) p = -INFINITY;
  }

  /// [3] Running maximum and probabilities. Rescales only when some row has a new maximum.
  __device__ __forceinline__ void update_softmax() {
    if (__any_sync(kAllLanes, p > m)) {
      float high = p;
#pragma unroll
      for (int distance = kRows * kLanesPerPair; distance < 32; distance *= 2) {
        high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, distance));
      }
      const float now = fmaxf(m, high);
      const float f = exp2_approx(m - now);
      m = now;
      l *= f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float row_f = __shfl_sync(kAllLanes, f, r * kLanesPerPair);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          o[r][part] = {o[r][part].x * row_f, o[r][part].y * row_f, o[r][part].z * row_f, o[r][part].w * row_f};
        }
      }
    }
    p = exp2_approx(p - m);
    l += p;
  }

  /// [4] Adds a step's values. Where rows see different tokens those without weight stay away: 0 times a NaN is one.
  __device__ __forceinline__ void accumulate_values(bool rows_differ) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float row_p = __shfl_sync(kAllLanes, p, (i * kRows + r) * kLanesPerPair);
        if (rows_differ && row_p == 0.0F) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) add_scaled(o[r][part], row_p, v[i][part]);
      }
    }
  }

  /// [5] This warp's partial to shared memory.
  __device__ __forceinline__ void store_partial(const MergeArea& area, int warp) {
#pragma unroll
    for (int distance = kRows * kLanesPerPair; distance < 32; distance *= 2) {
      l += __shfl_xor_sync(kAllLanes, l, distance);
    }
    if (lane_token() == 0 && lane % kLanesPerPair == 0 && lane_row() < area.rows) {
      area.ml[warp * area.rows + lane_row()] = make_float2(m, l);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (r < area.rows && dim(part) < area.dim_v) {
          *area.four(warp, r, dim(part)) = exchange_pairs(o[r][part], MergeArea::is_exchanged(r));
        }
      }
    }
  }
};

template <int kRows, int kParts, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) attend_generic(const __grid_constant__ AttendParams params) {
  cuda_trigger_dependents();
  const BlockWork w = find_work<kJoinWorkspace, false>(params);
  if (w.split >= w.num_splits) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kStep = GenericTile<kRows, kParts>::kTokens;

  GenericTile<kRows, kParts> tile;
  tile.lane = static_cast<int>(threadIdx.x) % 32;
  tile.k_base = w.seq * params.k.seq + w.kv_head * params.k.head;
  tile.v_base = w.seq * params.v.seq + w.kv_head * params.v.head;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) tile.o[r][part] = {0.0F, 0.0F, 0.0F, 0.0F};
  }

  int token = w.begin + w.tile_begin * kTileTokens + warp * kStep;
  const int end = min(w.end, w.begin + w.tile_end * kTileTokens);
  bool has_step = token < end;
  const bool early = params.earlier_kv_ready && token + kStep <= w.kv_len - params.q_len;
  if (!early) cuda_wait_for_preceding();
  if (has_step) {
    tile.load_keys(params, token, w.end);
    tile.load_values(params, token, w.end);
  }
  touch_params(params);
  if (early) cuda_wait_for_preceding();
  tile.load_row_tile(params, w);
  Ticket ticket = take_ticket(params, w);

  const RowRange range = range_of(params, w, min(tile.lane_row(), w.num_rows - 1));
  const bool rows_differ = params.q_len > 1 && (params.causal || params.window > 0);
  const int first_joining = w.num_splits - joiners_of(params, w, params.head_dim_v / 4);
  ask_again(params, w, first_joining, ticket);
  while (has_step) {
    const int next = token + kWarps * kStep;
    const bool has_next = next < end;
    tile.score_tokens(params.scale_log2);
    if (has_next) tile.load_keys(params, next, w.end);
    tile.hide_tokens(range, token);
    tile.update_softmax();
    tile.accumulate_values(rows_differ);
    if (has_next) tile.load_values(params, next, w.end);
    token = next;
    has_step = has_next;
  }

  const MergeArea area = lay_out_area<Known<kWarps>>(params, params.shape.rows_per_block, params.head_dim_v);
  tile.store_partial(area, warp);
  __shared__ JoinTurn turn;
  if (threadIdx.x == 0) turn.ticket = settle_ticket(params, w, ticket, first_joining, turn.left);
  __syncthreads();
  join_block<Known<kWarps>, kJoinWorkspace>(params, w, area, params.head_dim_v / 4, turn);
}

}  // namespace kvonce::cuda
