// From the warps' partials to the output: the block's shared memory, and what every join has in common.
#pragma once

#include "cuda/partial.cuh"
#include "cuda/work.cuh"
#include "shared/partial.h"

namespace kvonce::cuda {

/// Shared memory of a block. Within eight dims of a row the four pairs stand at pair ^ (row / 2 % 4), so that the
/// fragments of a warp fall into different banks.
struct MergeArea {
  float* x;         // [num_warps][rows][head_dim_v]
  float2* ml;       // [num_warps][rows]
  float4* mail;     // cluster: [own slices][num_splits][kSlice]
  float2* mail_ml;  // cluster: [own slices][num_splits][slice_rows]
  int rows;         // of a warp's place
  int dim_v;

  /// Where a pair of dims stands, from an even one on.
  __device__ __forceinline__ static unsigned pair_at(unsigned row, unsigned dim) { return dim ^ (row & 6); }
  /// Four dims of a row, their two pairs exchanged where is_exchanged(row).
  __device__ __forceinline__ float4* four(unsigned warp, unsigned row, unsigned dim) const {
    return reinterpret_cast<float4*>(x + (warp * rows + row) * dim_v + (dim ^ (row & 4)));
  }
  /// The place of dims 8j.. of a row in a group's partial (attend_warpgroup.cuh): four rows side by side miss each other's banks.
  __device__ __forceinline__ static unsigned wide_at(unsigned row, unsigned dim) { return dim ^ (row & 3) << 3; }
  __device__ __forceinline__ static bool is_exchanged(unsigned row) { return (row & 2) != 0; }
};
__device__ __forceinline__ float4 exchange_pairs(const float4& v, bool exchange) {
  return exchange ? float4{v.z, v.w, v.x, v.y} : v;
}

extern __shared__ __align__(16) unsigned char shared_bytes[];

template <class K>
__device__ __forceinline__ MergeArea lay_out_area(const AttendParams& p, int rows, int dim_v, int kv_bytes = 0) {
  MergeArea area;
  area.rows = rows;
  area.dim_v = dim_v;
  area.x = reinterpret_cast<float*>(shared_bytes);
  area.ml = reinterpret_cast<float2*>(area.x + merge_x_floats(K::kPartials, rows, dim_v, kv_bytes));
  area.mail = reinterpret_cast<float4*>(area.ml + merge_ml_pairs(K::kPartials, rows));
  area.mail_ml = reinterpret_cast<float2*>(area.mail + p.shape.own_slices * p.shape.num_splits * kSlice);
  return area;
}

__device__ __forceinline__ void store_output(void* out, Element type, std::int64_t at, bool vector, const float4& x) {
  if (type == kF32) {
    float* const to = static_cast<float*>(out) + at;
    if (vector) {
      *reinterpret_cast<float4*>(to) = x;
    } else {
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    return;
  }
  uint2 words;
  if (type == kF16) {
    words = {pack(x.x, x.y, f16()), pack(x.z, x.w, f16())};
  } else {
    words = {pack(x.x, x.y, bf16()), pack(x.z, x.w, bf16())};
  }
  auto* const to = static_cast<std::uint16_t*>(out) + at;
  if (vector) {
    *reinterpret_cast<uint2*>(to) = words;
  } else {
    to[0] = static_cast<std::uint16_t>(words.x), to[1] = static_cast<std::uint16_t>(words.x >> 16);
    to[2] = static_cast<std::uint16_t>(words.y), to[3] = static_cast<std::uint16_t>(words.y >> 16);
  }
}

/// Where an element of the stream's output goes.
struct OutPlace {
  RowPlace row;
  unsigned dim;
  std::int64_t at;
};
template <class K>
__device__ __forceinline__ OutPlace place_element(const AttendParams& p, const BlockWork& w, unsigned e,
                                                  unsigned row_elements) {
  const unsigned dim = e % row_elements * 4;
  const RowPlace row = place_of<K::kPlain>(p, w, static_cast<int>(e / row_elements));
  return {row, dim, w.seq * p.out_seq + row.head * p.out_head + row.query * p.out_token + dim};
}

/// An element of the stream's output: sink, normalisation, out and, from a row's first element, lse.
template <class K>
__device__ __forceinline__ void finish(const AttendParams& p, const BlockWork& w, const OutPlace& to, Partial a) {
  const RowPlace place = to.row;
  const unsigned dim = to.dim;
  const std::int64_t at = to.at;
  if constexpr (!K::kPlain) {
    if (p.sinks != nullptr) {
      const float4 x[1] = {{0.0F, 0.0F, 0.0F, 0.0F}};
      const float2 ml[1] = {make_float2(p.sinks[place.head] * shared::kLog2e, 1.0F)};
      join(a, x, ml, 1);
    }
  }
  const float scale = a.l == 0.0F ? 0.0F : reciprocal_approx(a.l);  // l is 0 or at least 1
  const float4 x = {a.x.x * scale, a.x.y * scale, a.x.z * scale, a.x.w * scale};
  if constexpr (K::kPlain) {
    using Out = typename K::Out;
    *reinterpret_cast<uint2*>(static_cast<Out*>(p.out) + at) = {pack(x.x, x.y, Out()), pack(x.z, x.w, Out())};
  } else {
    store_output(p.out, p.out_type, at, p.vector_out, x);
  }
  if (p.lse != nullptr && dim == 0) {
    p.lse[w.seq * p.lse_seq + place.head * p.lse_head + place.query * p.lse_token] =
        a.l == 0.0F ? -INFINITY : (a.m + log2f(a.l)) * shared::kLn2;
  }
}

template <class K>
__device__ __forceinline__ void finish(const AttendParams& p, const BlockWork& w, unsigned e, unsigned row_elements,
                                       const Partial& a) {
  finish<K>(p, w, place_element<K>(p, w, e, row_elements), a);
}

/// Joins the warps' partials of an element.
template <class K>
__device__ __forceinline__ Partial join_warps(const MergeArea& area, unsigned row, unsigned dim) {
  float4 x[K::kAttending];
  float2 ml[K::kAttending];
#pragma unroll
  for (unsigned warp = 0; warp < K::kAttending; ++warp) {
    if constexpr (K::kGroups) {
      x[warp] = *reinterpret_cast<const float4*>(area.x + (warp * area.rows + row) * area.dim_v +
                                                 MergeArea::wide_at(row, dim));
    } else {
      x[warp] = *area.four(warp, row, dim);
    }
    ml[warp] = area.ml[warp * area.rows + row];
  }
  Partial a = join_first(x, ml);
  if constexpr (!K::kGroups) a.x = exchange_pairs(a.x, MergeArea::is_exchanged(row));
  return a;
}

/// The first row that a slice touches.
__device__ __forceinline__ unsigned first_row_of(unsigned slice, unsigned row_elements) {
  return slice * kSlice / row_elements;
}

/// Calls each(e) for the elements of this thread.
template <class K, class Each>
__device__ __forceinline__ void for_elements(unsigned elements, const Each& each) {
#pragma unroll 1
  for (unsigned e = threadIdx.x; e < elements; e += K::kThreads) each(e);
}

}  // namespace kvonce::cuda
