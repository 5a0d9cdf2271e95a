// Partials and how they join.
//
// A partial here is not normalised: x = sum of 2^(score - m) * v, with the running maximum m (log2) and l = sum of
// 2^(score - m). An element is four neighbouring dims of one row; the output of a block has num_rows * head_dim_v / 4.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx.cuh"

namespace kvonce::cuda {

/// What an instance of a kernel knows when it is compiled. Plain decode: one query token, up to kPlainRows query heads per KV
/// head, no kv_starts, window or sinks, output rows of type Out at multiples of 8 bytes, head_dim_v a multiple of 64.
/// kSlicesOfJoin: slices that are joined at once, 1 or 2; 0: one, by lanes (join_slice_by_lanes). kWarpsThatAttend: the first ones of the block's, the others only join.
/// kAsGroups: a block's partials are those of two groups of four warps instead (attend_warpgroup.cuh).
template <int kWarpsOfBlock, bool kIsPlain = false, typename OutType = void, int kSlicesOfJoin = 1,
          int kWarpsThatAttend = kWarpsOfBlock, bool kAsGroups = false>
struct Known {
  static constexpr int kWarps = kWarpsOfBlock;
  static constexpr bool kGroups = kAsGroups;
  static constexpr int kAttending = kGroups ? 2 : kWarpsThatAttend;  // partials of a block
  static constexpr int kPartials = kGroups ? 2 : kWarpsOfBlock;      // that shared memory has room for
  static constexpr bool kByLanes = kSlicesOfJoin == 0;
  static constexpr int kJoinedSlices = kByLanes ? 1 : kSlicesOfJoin;
  static constexpr int kThreads = kWarps * 32;
  static constexpr bool kPlain = kIsPlain;
  using Out = OutType;
};

constexpr float kNoMax = -3.402823466e38F;  // finite, so that the difference of two of them is 0

struct Partial {
  float4 x = {0.0F, 0.0F, 0.0F, 0.0F};
  float m = kNoMax;
  float l = 0.0F;
};

/// a gains n partials of the same element: one maximum first, then all weights at once.
template <int kCount>
__device__ __forceinline__ void join(Partial& a, const float4 (&x)[kCount], const float2 (&ml)[kCount], int n) {
  float shift = a.m;
#pragma unroll
  for (int i = 0; i < kCount; ++i) shift = i < n ? fmaxf(shift, ml[i].x) : shift;
  const float own = exp2_approx(a.m - shift);
  a.x = {a.x.x * own, a.x.y * own, a.x.z * own, a.x.w * own};
  a.l *= own;
  a.m = shift;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i >= n) continue;
    const float f = exp2_approx(ml[i].x - shift);
    a.x.x = fmaf(x[i].x, f, a.x.x);
    a.x.y = fmaf(x[i].y, f, a.x.y);
    a.x.z = fmaf(x[i].z, f, a.x.z);
    a.x.w = fmaf(x[i].w, f, a.x.w);
    a.l = fmaf(ml[i].y, f, a.l);
  }
}

/// Joins kCount partials of the same element.
template <int kCount>
__device__ __forceinline__ Partial join_first(const float4 (&x)[kCount], const float2 (&ml)[kCount]) {
  Partial a;
  a.m = ml[0].x;
#pragma unroll
  for (int i = 1; i < kCount; ++i) a.m = fmaxf(a.m, ml[i].x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float f = exp2_approx(ml[i].x - a.m);
    a.x.x = fmaf(x[i].x, f, a.x.x);
    a.x.y = fmaf(x[i].y, f, a.x.y);
    a.x.z = fmaf(x[i].z, f, a.x.z);
    a.x.w = fmaf(x[i].w, f, a.x.w);
    a.l = fmaf(ml[i].y, f, a.l);
  }
  return a;
}

/// Joins what lanes kFirst, 2 * kFirst, ... below kEnd apart (powers of two) gathered of one element; all get the result.
template <int kFirst, int kEnd>
__device__ __forceinline__ void join_lanes(Partial& a) {
  float shift = a.m;
#pragma unroll
  for (int step = kFirst; step < kEnd; step *= 2) shift = fmaxf(shift, __shfl_xor_sync(kAllLanes, shift, step));
  const float f = exp2_approx(a.m - shift);
  a.m = shift;
  a.x = {a.x.x * f, a.x.y * f, a.x.z * f, a.x.w * f};
  a.l *= f;
#pragma unroll
  for (int step = kFirst; step < kEnd; step *= 2) {
    a.x.x += __shfl_xor_sync(kAllLanes, a.x.x, step);
    a.x.y += __shfl_xor_sync(kAllLanes, a.x.y, step);
    a.x.z += __shfl_xor_sync(kAllLanes, a.x.z, step);
    a.x.w += __shfl_xor_sync(kAllLanes, a.x.w, step);
    a.l += __shfl_xor_sync(kAllLanes, a.l, step);
  }
}

__device__ __forceinline__ float without_empty_word(float x) {
  return __float_as_uint(x) == kEmptyWord ? __uint_as_float(0x7fffffffU) : x;
}
__device__ __forceinline__ bool is_full(const float4& v) {
  return __float_as_uint(v.x) != kEmptyWord && __float_as_uint(v.y) != kEmptyWord &&
         __float_as_uint(v.z) != kEmptyWord && __float_as_uint(v.w) != kEmptyWord;
}
__device__ __forceinline__ bool is_full(const float2& v) {
  return __float_as_uint(v.x) != kEmptyWord && __float_as_uint(v.y) != kEmptyWord;
}

}  // namespace kvonce::cuda
