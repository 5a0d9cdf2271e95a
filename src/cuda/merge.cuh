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

/// What thread 0 asks for at the start and needs at the end.
struct Ticket {
  std::uint32_t prepared = kPreparedWord;
  int number = 0;
};

/// Takes this block's place in the order in which the blocks of its stream start; the counter is back at 0 when all have
/// asked. Nothing waits for the answer here: an increment with a limit is not gathered over the warp as an addition is.
__device__ __forceinline__ Ticket take_ticket(const AttendParams& p, const BlockWork& w) {
  Ticket ticket;
  const int ask = threadIdx.x == 0 && w.num_splits > 1 ? 1 : 0;
  asm volatile(
      "{\n\t"
      ".reg .pred ask;\n\t"
      "setp.ne.s32 ask, %2, 0;\n\t"
      "@ask ld.relaxed.gpu.global.u32 %0, [%3];\n\t"
      "@ask atom.relaxed.gpu.global.inc.u32 %1, [%4], %5;\n\t"
      "}"
      : "+r"(ticket.prepared), "+r"(ticket.number)
      : "r"(ask), "l"(p.header), "l"(p.tickets + w.stream), "r"(w.num_splits - 1)
      : "memory");
  return ticket;
}

/// The ticket's number; -1 in a workspace that nobody prepared.
__device__ __forceinline__ int show_ticket(const Ticket& ticket) {
  return ticket.prepared == kPreparedWord ? ticket.number : -1;
}

extern __shared__ __align__(16) unsigned char shared_bytes[];

template <int kWarps>
__device__ __forceinline__ MergeArea lay_out_area(const AttendParams& p, const BlockWork& w, int dim_v) {
  MergeArea area;
  area.rows = w.num_rows;
  area.dim_v = dim_v;
  area.x = reinterpret_cast<float*>(shared_bytes);
  area.ml = reinterpret_cast<float2*>(area.x + merge_x_floats(kWarps, w.num_rows, dim_v));
  area.received = reinterpret_cast<float4*>(area.ml + merge_ml_pairs(kWarps, w.num_rows));
  area.received_ml = reinterpret_cast<float2*>(area.received + received_elements(p));
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
  if (p.sinks != nullptr) {
    const float4 x[1] = {{0.0F, 0.0F, 0.0F, 0.0F}};
    const float2 ml[1] = {make_float2(p.sinks[place.head] * shared::kLog2e, 1.0F)};
    join(a, x, ml, 1);
  }
  const float scale = a.l == 0.0F ? 0.0F : 1.0F / a.l;
  const std::int64_t at = w.seq * p.out_seq + place.head * p.out_head + place.query * p.out_token + dim;
  store_output(p.out, p.out_type, at, p.vector_out, {a.x.x * scale, a.x.y * scale, a.x.z * scale, a.x.w * scale});
  if (p.lse != nullptr && dim == 0) {
    p.lse[w.seq * p.lse_seq + place.head * p.lse_head + place.query * p.lse_token] =
        a.l == 0.0F ? -INFINITY : (a.m + log2f(a.l)) * shared::kLn2;
  }
}

/// Joins the warps' partials of an element.
template <int kWarps>
__device__ __forceinline__ Partial join_warps(const MergeArea& area, int row, int dim) {
  float4 x[kWarps];
  float2 ml[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    x[warp] = area.load4(warp, row, dim);
    ml[warp] = area.ml[warp * area.rows + row];
  }
  Partial a;
  join(a, x, ml, kWarps);
  return a;
}

/// One cluster holds the whole stream: every block sends each other block the elements of its slice, then finishes its own.
template <int kWarps>
__device__ __forceinline__ void join_cluster(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                             int row_elements) {
  constexpr int kThreads = kWarps * 32;
  const int elements = w.num_rows * row_elements;
  const int slice = 1 << p.slice_log2;
  cluster_wait();  // every block of the cluster has started
  for (int e = static_cast<int>(threadIdx.x); e < elements; e += kThreads) {
    const int row = e / row_elements;
    const Partial a = join_warps<kWarps>(area, row, (e - row * row_elements) * 4);
    const int owner = e >> p.slice_log2;
    const int at = w.split * slice + (e & (slice - 1));
    cluster_store(cluster_address(area.received + at, owner), a.x);
    cluster_store(cluster_address(area.received_ml + at, owner), make_float2(a.m, a.l));
  }
  cluster_arrive();
  cluster_wait();
  const int begin = w.split * slice;
  const int mine = min(slice, elements - begin);
  // Every element is gathered by `lanes` neighbours, each in turn over the blocks.
  constexpr int lanes = 8;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  for (int from = 0; from < mine; from += kThreads / lanes) {
    const int at = from + static_cast<int>(threadIdx.x) / lanes;
    Partial a;
    if (at < mine) {
      constexpr int kAtOnce = 2;  // of up to 16 blocks
      float4 x[kAtOnce];
      float2 ml[kAtOnce];
      int n = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (lane + i * lanes < p.num_splits) {
          x[i] = area.received[(lane + i * lanes) * slice + at];
          ml[i] = area.received_ml[(lane + i * lanes) * slice + at];
          n = i + 1;
        }
      }
      join(a, x, ml, n);
    }
    join_lanes<1, lanes>(a);
    if (at < mine && lane == 0) finish(p, w, begin + at, row_elements, a);
  }
}

/// Blocks of a stream write their partials to the workspace. Those that took the last tickets wait for the others and join
/// a slice each. Whoever holds an earlier ticket is running already, so waiting keeps nobody from a place on the device.
template <int kWarps>
__device__ __forceinline__ void join_workspace(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                               int row_elements, int ticket) {
  constexpr int kThreads = kWarps * 32;
  const int elements = w.num_rows * row_elements;
  int slice_log2 = p.slice_log2;
  while ((elements - 1) >> slice_log2 >= w.num_splits) ++slice_log2;
  const int slice = 1 << slice_log2;
  const int joiners = ((elements - 1) >> slice_log2) + 1;
  // Offsets within a stream's part of the workspace fit 32 bits: make_plan refuses larger ones.
  const int capacity = p.rows_per_block * row_elements;  // elements of a split's place
  auto* const partials = reinterpret_cast<float4*>(p.partial_o) + w.stream * p.num_splits * capacity;
  float2* const all_ml = p.partial_ml + w.stream * p.join_blocks * p.num_splits * p.slice_rows;
  for (int e = static_cast<int>(threadIdx.x); e < elements; e += kThreads) {
    const int row = e / row_elements;
    const int column = e - row * row_elements;
    Partial a = join_warps<kWarps>(area, row, column * 4);
    a.x = {without_empty_word(a.x.x), without_empty_word(a.x.y), without_empty_word(a.x.z), without_empty_word(a.x.w)};
    store_words(partials + static_cast<std::int64_t>(w.split) * capacity + e, a.x);
    const int owner = e >> slice_log2;
    if (column == 0 || (e & (slice - 1)) == 0) {
      const int at = (owner * p.num_splits + w.split) * p.slice_rows + row - (owner << slice_log2) / row_elements;
      store_words(all_ml + at, make_float2(without_empty_word(a.m), without_empty_word(a.l)));
    }
  }
  const int joiner = ticket - (w.num_splits - joiners);
  if (joiner < 0) return;
  const int begin = joiner * slice;
  const int mine = min(slice, elements - begin);
  float2* const ml = all_ml + static_cast<std::int64_t>(joiner) * p.num_splits * p.slice_rows;
  const int first_row = begin / row_elements;
  const float empty = __uint_as_float(kEmptyWord);
  // Groups of kSlice threads take the splits in turn, a thread an element: a split's part of a slice is 256 neighbouring
  // bytes. Then the warps' sums meet in shared memory.
  constexpr int kGroups = kThreads / kSlice;
  const int group = static_cast<int>(threadIdx.x) / kSlice;
  for (int from = 0; from < mine; from += kSlice) {
    const int at = from + static_cast<int>(threadIdx.x) % kSlice;
    Partial a;
    if (at < mine) {
      float4* const element = partials + begin + at;
      float2* const element_ml = ml + ((begin + at) / row_elements - first_row);
      constexpr int kAtOnce = 4;  // loads in flight
      for (int split = group; split < w.num_splits; split += kAtOnce * kGroups) {
        const int n = (w.num_splits - split + kGroups - 1) / kGroups;
        float4 x[kAtOnce];
        float2 y[kAtOnce];
        bool full = false;
        while (!full) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (i < n) {
              x[i] = load_words(element + static_cast<std::int64_t>(split + i * kGroups) * capacity);
              y[i] = load_words(element_ml + static_cast<std::int64_t>(split + i * kGroups) * p.slice_rows);
            }
          }
          full = true;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (i < n) full = full && is_full(x[i]) && is_full(y[i]);
          }
        }
        // Read: the place is empty again for the next call.
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i < n) {
            store_words(element + static_cast<std::int64_t>(split + i * kGroups) * capacity,
                        {empty, empty, empty, empty});
          }
        }
        join(a, x, y, n);
      }
    }
    join_lanes<kSlice, 32>(a);
    auto* const sums = reinterpret_cast<float4*>(area.x);  // [kWarps][kSlice + 1]: the warps' partials are used up
    auto* const sums_ml = reinterpret_cast<float2*>(sums + kWarps * (kSlice + 1));
    const int place = static_cast<int>(threadIdx.x) / 32 * (kSlice + 1) + static_cast<int>(threadIdx.x) % 32;
    __syncthreads();
    if (threadIdx.x % 32 < kSlice) {
      sums[place] = a.x;
      sums_ml[place] = make_float2(a.m, a.l);
    }
    __syncthreads();
    const int sum_at = static_cast<int>(threadIdx.x) / kWarps;
    if (threadIdx.x / 32 >= kSlice * kWarps / 32) continue;  // whole warps
    const int sum = static_cast<int>(threadIdx.x) % kWarps * (kSlice + 1) + sum_at;
    a = {sums[sum], sums_ml[sum].x, sums_ml[sum].y};
    join_lanes<1, kWarps>(a);
    if (from + sum_at < mine && threadIdx.x % kWarps == 0) finish(p, w, begin + from + sum_at, row_elements, a);
  }
  // A row's maximum and sum were read by several elements: their places are emptied when all have.
  __syncthreads();
  const int rows = (begin + mine - 1) / row_elements - first_row + 1;
  for (int i = static_cast<int>(threadIdx.x); i < w.num_splits * rows; i += kThreads) {
    store_words(ml + i / rows * p.slice_rows + i % rows, make_float2(empty, empty));
  }
}

/// Joins the warps' partials, which are in `area`, then those of the stream's blocks.
template <int kWarps, Join kJoin>
__device__ __forceinline__ void merge_block(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                            int row_elements, int ticket) {
  if constexpr (kJoin == kJoinCluster) {
    join_cluster<kWarps>(p, w, area, row_elements);
  } else if (w.num_splits > 1 && ticket >= 0) {
    join_workspace<kWarps>(p, w, area, row_elements, ticket);
  } else {
    for (int e = static_cast<int>(threadIdx.x); e < w.num_rows * row_elements; e += kWarps * 32) {
      const int row = e / row_elements;
      Partial a = join_warps<kWarps>(area, row, (e - row * row_elements) * 4);
      if (ticket < 0) a.l = __uint_as_float(0x7fffffffU);  // a workspace that nobody prepared: NaN
      finish(p, w, e, row_elements, a);
    }
  }
}

}  // namespace kvonce::cuda
