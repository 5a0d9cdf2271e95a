// From the warps' partials to the output: in the block, then across the blocks of a KV stream.
//
// A partial here is not normalised: x = sum of 2^(score - m) * v, with the running maximum m (log2) and l = sum of
// 2^(score - m). An element is four neighbouring dims of one row; the output of a block has num_rows * head_dim_v / 4.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx.cuh"
#include "cuda/work.cuh"
#include "shared/partial.h"

namespace kvonce::cuda {

constexpr float kNoMax = -3.402823466e38F;  // finite, so that the difference of two of them is 0

struct Partial {
  float4 x = {0.0F, 0.0F, 0.0F, 0.0F};
  float m = kNoMax;
  float l = 0.0F;
};

__device__ __forceinline__ void join(Partial& a, const float4& x, float m, float l) {
  const float shift = fmaxf(a.m, m);
  const float fa = exp2_approx(a.m - shift);
  const float fb = exp2_approx(m - shift);
  a.x.x = a.x.x * fa + x.x * fb;
  a.x.y = a.x.y * fa + x.y * fb;
  a.x.z = a.x.z * fa + x.z * fb;
  a.x.w = a.x.w * fa + x.w * fb;
  a.l = a.l * fa + l * fb;
  a.m = shift;
}

/// Shared memory of a block. Within eight dims of a row the four pairs stand at pair ^ (row / 2 % 4), so that the
/// fragments of a warp fall into different banks.
struct MergeArea {
  float* x;          // [num_warps][rows][head_dim_v]
  float2* ml;        // [num_warps][rows]
  float4* received;  // cluster: [num_splits][slice elements]
  float2* received_ml;
  int rows;
  int dim_v;

  /// A pair of dims, from an even one on.
  __device__ __forceinline__ float2* pair(int warp, int row, int dim) const {
    return reinterpret_cast<float2*>(x + (warp * rows + row) * dim_v + (dim ^ (row & 6)));
  }
  __device__ __forceinline__ float4 load4(int warp, int row, int dim) const {
    const float4 v = *reinterpret_cast<const float4*>(x + (warp * rows + row) * dim_v + (dim ^ (row & 4)));
    return (row & 2) != 0 ? float4{v.z, v.w, v.x, v.y} : v;
  }
  __device__ __forceinline__ void store4(int warp, int row, int dim, const float4& v) const {
    *reinterpret_cast<float4*>(x + (warp * rows + row) * dim_v + (dim ^ (row & 4))) =
        (row & 2) != 0 ? float4{v.z, v.w, v.x, v.y} : v;
  }
};

/// Takes this block's place in the order in which the blocks of its stream started; -1 in a workspace nobody prepared.
__device__ __forceinline__ int take_ticket(const AttendParams& p, const BlockWork& w) {
  if (p.join == kJoinCluster || w.num_splits == 1) return 0;
  if (*reinterpret_cast<volatile std::uint32_t*>(p.header) != kPreparedWord) return -1;
  const auto ticket = static_cast<int>(atomicAdd(p.tickets + w.stream, 1U));
  if (ticket == w.num_splits - 1) p.tickets[w.stream] = 0;  // the last one: nobody else asks before the next call
  return ticket;
}

extern __shared__ __align__(16) unsigned char shared_bytes[];

template <int kWarps>
__device__ __forceinline__ MergeArea lay_out_area(const AttendParams& p, const BlockWork& w, int dim_v) {
  MergeArea area;
  area.rows = w.num_rows;
  area.dim_v = dim_v;
  area.x = reinterpret_cast<float*>(shared_bytes);
  area.ml = reinterpret_cast<float2*>(area.x + merge_x_floats(kWarps, w.num_rows, dim_v, kWarps * 32));
  area.received = reinterpret_cast<float4*>(area.ml + merge_ml_pairs(kWarps, w.num_rows, kWarps * 32));
  area.received_ml = reinterpret_cast<float2*>(area.received + received_elements(p, w.num_rows, dim_v));
  return area;
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

/// Element e of the stream's output: sink, normalisation, out and, from a row's first element, lse.
__device__ __forceinline__ void finish(const AttendParams& p, const BlockWork& w, int e, int row_elements, Partial a) {
  const int row = e / row_elements;
  const int dim = (e - row * row_elements) * 4;
  const RowPlace place = place_of(p, w, row);
  if (p.sinks != nullptr) join(a, {0.0F, 0.0F, 0.0F, 0.0F}, p.sinks[place.head] * shared::kLog2e, 1.0F);
  const float scale = a.l == 0.0F ? 0.0F : 1.0F / a.l;
  const std::int64_t at = w.seq * p.out_seq + place.head * p.out_head + place.query * p.out_token + dim;
  store_output(p.out, p.out_type, at, p.vector_out, {a.x.x * scale, a.x.y * scale, a.x.z * scale, a.x.w * scale});
  if (p.lse != nullptr && dim == 0) {
    p.lse[w.seq * p.lse_seq + place.head * p.lse_head + place.query * p.lse_token] =
        a.l == 0.0F ? -INFINITY : (a.m + log2f(a.l)) * shared::kLn2;
  }
}

/// Joins the warps' partials of element e.
template <int kWarps>
__device__ __forceinline__ Partial join_warps(const MergeArea& area, int row, int dim) {
  float2 ml[kWarps];
  float shift = kNoMax;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    ml[warp] = area.ml[warp * area.rows + row];
    shift = fmaxf(shift, ml[warp].x);
  }
  Partial a;
  a.m = shift;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float4 x = area.load4(warp, row, dim);
    const float f = exp2_approx(ml[warp].x - shift);
    a.x.x += x.x * f;
    a.x.y += x.y * f;
    a.x.z += x.z * f;
    a.x.w += x.w * f;
    a.l += ml[warp].y * f;
  }
  return a;
}

/// Joins, across the groups of `width` threads of the block, what each thread gathered of its element, and finishes it.
/// Thread i holds element slice_begin + i % width.
template <int kThreads>
__device__ __forceinline__ void finish_slice(const AttendParams& p, const BlockWork& w, float4* scratch,
                                             float2* scratch_ml, int width, int slice_begin, int slice_elements,
                                             int row_elements, const Partial& mine) {
  __syncthreads();
  scratch[threadIdx.x] = mine.x;
  scratch_ml[threadIdx.x] = make_float2(mine.m, mine.l);
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  if (i >= slice_elements) return;
  Partial a;
  for (int at = i; at < kThreads; at += width) join(a, scratch[at], scratch_ml[at].x, scratch_ml[at].y);
  finish(p, w, slice_begin + i, row_elements, a);
}

/// The smallest power of two that is at least n.
__device__ __forceinline__ int pow2_at_least(int n) { return n <= 1 ? 1 : 1 << (32 - __clz(n - 1)); }

/// One cluster holds the whole stream: every block sends each other block the elements of its slice, then finishes its own.
template <int kWarps>
__device__ __forceinline__ void join_cluster(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                             int row_elements) {
  constexpr int kThreads = kWarps * 32;
  const int elements = w.num_rows * row_elements;
  const int blocks = p.num_splits;
  const int slice = (elements + blocks - 1) / blocks;
  cluster_wait();  // every block of the cluster has started
  for (int e = static_cast<int>(threadIdx.x); e < elements; e += kThreads) {
    const int row = e / row_elements;
    const Partial a = join_warps<kWarps>(area, row, (e - row * row_elements) * 4);
    const int owner = e / slice;
    const int at = w.split * slice + e - owner * slice;
    cluster_store(cluster_address(area.received + at, owner), a.x);
    cluster_store(cluster_address(area.received_ml + at, owner), make_float2(a.m, a.l));
  }
  cluster_arrive();
  cluster_wait();
  const int begin = w.split * slice;
  const int mine = min(slice, elements - begin);
  // Every element is gathered by `lanes` neighbours of a warp, each in turn over the blocks.
  constexpr int lanes = 4;
  for (int at = static_cast<int>(threadIdx.x) / lanes; at - static_cast<int>(threadIdx.x) / lanes < mine;
       at += kThreads / lanes) {
    Partial a;
    if (at < mine) {
      for (int block = static_cast<int>(threadIdx.x) % lanes; block < blocks; block += lanes) {
        const float2 ml = area.received_ml[block * slice + at];
        join(a, area.received[block * slice + at], ml.x, ml.y);
      }
    }
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) {
      const float4 x = {__shfl_xor_sync(kAllLanes, a.x.x, step), __shfl_xor_sync(kAllLanes, a.x.y, step),
                        __shfl_xor_sync(kAllLanes, a.x.z, step), __shfl_xor_sync(kAllLanes, a.x.w, step)};
      const float m = __shfl_xor_sync(kAllLanes, a.m, step);
      const float l = __shfl_xor_sync(kAllLanes, a.l, step);
      join(a, x, m, l);
    }
    if (at < mine && threadIdx.x % lanes == 0) finish(p, w, begin + at, row_elements, a);
  }
}

/// Blocks of a stream write their partials to the workspace. The `join_blocks` that took the last tickets wait for the
/// others and join a slice each. Whoever holds an earlier ticket is running already, so waiting keeps nobody from a place.
template <int kWarps>
__device__ __forceinline__ void join_workspace(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                               int row_elements, int ticket) {
  constexpr int kThreads = kWarps * 32;
  const int elements = w.num_rows * row_elements;
  const int joiners = min(min(p.join_blocks, w.num_splits), elements);
  const int slice = (elements + joiners - 1) / joiners;
  const int capacity = p.rows_per_block * row_elements;  // elements of a split's place in the workspace
  auto* const partials = reinterpret_cast<float4*>(p.partial_o) + w.stream * p.num_splits * capacity;
  float2* const all_ml = p.partial_ml + w.stream * p.join_blocks * p.num_splits * p.slice_rows;
  for (int e = static_cast<int>(threadIdx.x); e < elements; e += kThreads) {
    const int row = e / row_elements;
    const int column = e - row * row_elements;
    Partial a = join_warps<kWarps>(area, row, column * 4);
    a.x = {without_empty_word(a.x.x), without_empty_word(a.x.y), without_empty_word(a.x.z), without_empty_word(a.x.w)};
    store_words(partials + static_cast<std::int64_t>(w.split) * capacity + e, a.x);
    const int owner = e / slice;
    if (column == 0 || e == owner * slice) {
      const int at = (owner * p.num_splits + w.split) * p.slice_rows + row - owner * slice / row_elements;
      store_words(all_ml + at, make_float2(without_empty_word(a.m), without_empty_word(a.l)));
    }
  }
  const int joiner = ticket - (w.num_splits - joiners);
  if (joiner < 0) return;
  const int begin = joiner * slice;
  const int mine = min(slice, elements - begin);
  if (mine <= 0) return;
  float2* const ml = all_ml + static_cast<std::int64_t>(joiner) * p.num_splits * p.slice_rows;
  const int first_row = begin / row_elements;
  const int width = min(kThreads, pow2_at_least(mine));
  const int group = static_cast<int>(threadIdx.x) / width;
  const int groups = kThreads / width;
  const float empty = __uint_as_float(kEmptyWord);
  for (int from = 0; from < mine; from += width) {
    const int i = from + static_cast<int>(threadIdx.x) % width;
    const bool has_element = i < mine;
    Partial a;
    if (has_element) {
      const int row = (begin + i) / row_elements - first_row;
      constexpr int kAtOnce = 4;  // loads in flight
      for (int split = group; split < w.num_splits; split += kAtOnce * groups) {
        float4 x[kAtOnce];
        float2 y[kAtOnce];
        bool full = false;
        while (!full) {
          full = true;
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const int s = split + j * groups;
            if (s < w.num_splits) {
              x[j] = load_words(partials + static_cast<std::int64_t>(s) * capacity + begin + i);
              y[j] = load_words(ml + s * p.slice_rows + row);
            }
          }
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            if (split + j * groups < w.num_splits) full = full && is_full(x[j]) && is_full(y[j]);
          }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (split + j * groups < w.num_splits) join(a, x[j], y[j].x, y[j].y);
        }
      }
    }
    finish_slice<kThreads>(p, w, reinterpret_cast<float4*>(area.x), area.ml, width, begin + from, min(width, mine - from),
                           row_elements, a);
    // Everyone has read: the place is empty again for the next call.
    if (has_element) {
      for (int s = group; s < w.num_splits; s += groups) {
        store_words(partials + static_cast<std::int64_t>(s) * capacity + begin + i, {empty, empty, empty, empty});
      }
    }
  }
  const int rows = (begin + mine - 1) / row_elements - first_row + 1;
  for (int i = static_cast<int>(threadIdx.x); i < w.num_splits * rows; i += kThreads) {
    store_words(ml + i / rows * p.slice_rows + i % rows, make_float2(empty, empty));
  }
}

/// All warps' partials are in `area` (after a __syncthreads()).
template <int kWarps>
__device__ __forceinline__ void merge_block(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                            int row_elements, int ticket) {
  if (ticket < 0) {
    const float nan = __uint_as_float(0x7fffffffU);
    for (int e = static_cast<int>(threadIdx.x); e < w.num_rows * row_elements; e += kWarps * 32) {
      finish(p, w, e, row_elements, {{nan, nan, nan, nan}, 0.0F, nan});
    }
  } else if (p.join == kJoinCluster) {
    join_cluster<kWarps>(p, w, area, row_elements);
  } else if (w.num_splits == 1) {
    const int elements = w.num_rows * row_elements;
    for (int e = static_cast<int>(threadIdx.x); e < elements; e += kWarps * 32) {
      const int row = e / row_elements;
      finish(p, w, e, row_elements, join_warps<kWarps>(area, row, (e - row * row_elements) * 4));
    }
  } else {
    join_workspace<kWarps>(p, w, area, row_elements, ticket);
  }
}

}  // namespace kvonce::cuda
