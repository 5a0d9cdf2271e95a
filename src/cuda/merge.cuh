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

/// What an instance of a kernel knows when it is compiled. Plain decode: one query token, up to kPlainRows query heads per KV
/// head, no kv_starts, window or sinks, output rows of type Out at multiples of 8 bytes, head_dim_v a multiple of 64.
template <int kWarpsOfBlock, bool kIsPlain = false, typename OutType = void>
struct Known {
  static constexpr int kWarps = kWarpsOfBlock;
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
  __device__ __forceinline__ static bool is_exchanged(unsigned row) { return (row & 2) != 0; }
};
__device__ __forceinline__ float4 exchange_pairs(const float4& v, bool exchange) {
  return exchange ? float4{v.z, v.w, v.x, v.y} : v;
}

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

template <class K>
__device__ __forceinline__ MergeArea lay_out_area(const AttendParams& p, const BlockWork& w, int dim_v) {
  MergeArea area;
  area.rows = K::kPlain ? kPlainRows : w.num_rows;
  area.dim_v = dim_v;
  area.x = reinterpret_cast<float*>(shared_bytes);
  const int rows = K::kPlain ? kPlainRows : p.shape.rows_per_block;
  area.ml = reinterpret_cast<float2*>(area.x + merge_x_floats(K::kWarps, rows, dim_v));
  area.mail = reinterpret_cast<float4*>(area.ml + merge_ml_pairs(K::kWarps, rows));
  area.mail_ml = reinterpret_cast<float2*>(area.mail + p.shape.own_slices * p.shape.num_splits * kSlice);
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
template <class K>
__device__ __forceinline__ void finish(const AttendParams& p, const BlockWork& w, unsigned e, unsigned row_elements,
                                       Partial a) {
  const unsigned row = e / row_elements;
  const unsigned dim = e % row_elements * 4;
  const RowPlace place = place_of<K::kPlain>(p, w, static_cast<int>(row));
  if constexpr (!K::kPlain) {
    if (p.sinks != nullptr) {
      const float4 x[1] = {{0.0F, 0.0F, 0.0F, 0.0F}};
      const float2 ml[1] = {make_float2(p.sinks[place.head] * shared::kLog2e, 1.0F)};
      join(a, x, ml, 1);
    }
  }
  const float scale = a.l == 0.0F ? 0.0F : reciprocal_approx(a.l);  // l is 0 or at least 1
  const float4 x = {a.x.x * scale, a.x.y * scale, a.x.z * scale, a.x.w * scale};
  const std::int64_t at = w.seq * p.out_seq + place.head * p.out_head + place.query * p.out_token + dim;
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

/// Joins the warps' partials of an element.
template <class K>
__device__ __forceinline__ Partial join_warps(const MergeArea& area, unsigned row, unsigned dim) {
  float4 x[K::kWarps];
  float2 ml[K::kWarps];
#pragma unroll
  for (unsigned warp = 0; warp < K::kWarps; ++warp) {
    x[warp] = *area.four(warp, row, dim);
    ml[warp] = area.ml[warp * area.rows + row];
  }
  Partial a = join_first(x, ml);
  a.x = exchange_pairs(a.x, MergeArea::is_exchanged(row));
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

/// Opens this block's mail and tells the cluster. Every block of a cluster takes part in its join.
template <class K>
__device__ __forceinline__ void open_mail(const AttendParams& p, const BlockWork& w, std::uint64_t* barrier,
                                          unsigned row_elements) {
  if (threadIdx.x == 0) {
    const unsigned elements = w.num_rows * row_elements;
    unsigned bytes = 0;
    for (unsigned slice = w.split; slice * kSlice < elements; slice += p.shape.num_splits) {
      const unsigned end = min((slice + 1) * kSlice, elements);
      const unsigned rows = K::kPlain ? 1 : (end - 1) / row_elements - first_row_of(slice, row_elements) + 1;
      bytes += (end - slice * kSlice) * 16 + rows * 8;
    }
    expect_bytes(barrier, bytes * p.shape.num_splits);
  }
  cluster_arrive_relaxed();
}

/// One cluster holds the whole stream: slice s belongs to block s % num_splits, and every block posts what it has of it to
/// the owner, who waits for all its bytes.
template <class K>
__device__ __forceinline__ void join_cluster(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                             std::uint64_t* barrier, unsigned row_elements) {
  const unsigned elements = w.num_rows * row_elements;
  const unsigned splits = p.shape.num_splits;
  const unsigned slice_rows = K::kPlain ? 1 : p.shape.slice_rows;
  const std::uint32_t mail = shared_address(area.mail);
  const std::uint32_t mail_ml = shared_address(area.mail_ml);
  cluster_wait();  // every block of the cluster has opened its mail
  for_elements<K>(elements, [&](unsigned e) {
    const unsigned row = e / row_elements;
    const unsigned column = e % row_elements;
    const Partial a = join_warps<K>(area, row, column * 4);
    const unsigned slice = e / kSlice;
    const unsigned own = __umulhi(slice, p.shape.splits_magic);  // slice / splits; a cluster has two blocks or more
    const unsigned owner = slice - own * splits;
    const unsigned slot = own * splits + w.split;
    const std::uint32_t owner_barrier = cluster_address(shared_address(barrier), owner);
    post(cluster_address(mail + (slot * kSlice + e % kSlice) * 16, owner), a.x, owner_barrier);
    if (e % kSlice == 0 || column == 0) {
      const unsigned at = slot * slice_rows + row - first_row_of(slice, row_elements);
      post(cluster_address(mail_ml + at * 8, owner), make_float2(a.m, a.l), owner_barrier);
    }
  });
  // Every element is gathered by kLanes neighbours, each in turn over the blocks.
  constexpr unsigned kLanes = 4;
  constexpr unsigned kAtOnce = 4;  // of up to 16 blocks
  const unsigned lane = threadIdx.x % kLanes;
  const unsigned own_elements = p.shape.own_slices * kSlice;
  if (threadIdx.x / kLanes >= own_elements) return;  // whole warps
  wait_for_bytes(barrier);
#pragma unroll 1
  for (unsigned item = threadIdx.x / kLanes; item < own_elements; item += K::kThreads / kLanes) {
    const unsigned own = item / kSlice;
    const unsigned slice = own * splits + w.split;
    const unsigned e = slice * kSlice + item % kSlice;
    const unsigned slice_row = K::kPlain ? 0 : e / row_elements - first_row_of(slice, row_elements);
    Partial a;
    if (e < elements) {
      float4 x[kAtOnce];
      float2 ml[kAtOnce];
      const int n = static_cast<int>((splits - lane + kLanes - 1) / kLanes);
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) {
        if (static_cast<int>(i) >= n) continue;
        const unsigned slot = own * splits + lane + i * kLanes;
        x[i] = area.mail[slot * kSlice + item % kSlice];
        ml[i] = area.mail_ml[slot * slice_rows + slice_row];
      }
      join(a, x, ml, n);
    }
    join_lanes<1, kLanes>(a);
    if (e < elements && lane == 0) finish<K>(p, w, e, row_elements, a);
  }
}

/// One slice of the output, from the workspace. Groups of kSlice threads take the splits in turn, a thread an element: a
/// split's part of a slice is 256 neighbouring bytes. Then the groups' sums meet in shared memory.
template <class K>
__device__ __forceinline__ void join_slice(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                           unsigned row_elements, unsigned slice, float4* partials, float2* slice_ml) {
  constexpr unsigned kGroups = K::kThreads / kSlice;
  constexpr unsigned kAtOnce = 32 / K::kWarps;  // loads in flight
  const unsigned elements = w.num_rows * row_elements;
  const unsigned capacity = (K::kPlain ? kPlainRows : p.shape.place_rows) * row_elements;
  const unsigned slice_rows = K::kPlain ? 1 : p.shape.slice_rows;
  const unsigned group = threadIdx.x / kSlice;
  const unsigned at = threadIdx.x % kSlice;
  const unsigned e = slice * kSlice + at;
  const bool exists = K::kPlain || e < elements;
  const unsigned slice_row = K::kPlain ? 0 : min(e, elements - 1) / row_elements - first_row_of(slice, row_elements);
  const bool is_first_of_row = at == 0 || (!K::kPlain && e % row_elements == 0);
  const float empty = __uint_as_float(kEmptyWord);
  Partial a;
  float4* element = partials + static_cast<std::int64_t>(group) * capacity + e;
  float2* element_ml = slice_ml + static_cast<std::int64_t>(group) * slice_rows + slice_row;
#pragma unroll 1
  for (int from = 0; from < w.num_splits; from += kAtOnce * kGroups) {
    const int n = exists ? (w.num_splits - from - static_cast<int>(group) + static_cast<int>(kGroups) - 1) /
                               static_cast<int>(kGroups)
                         : 0;
    float4 x[kAtOnce];
    float2 ml[kAtOnce];
    bool full = false;
    while (__any_sync(kAllLanes, !full)) {  // a row's maximum and sum are read by a whole group
      full = true;
#pragma unroll
      for (int i = 0; i < static_cast<int>(kAtOnce); ++i) {
        if (i >= n) continue;
        x[i] = load_words(element + static_cast<std::int64_t>(i * kGroups) * capacity);
        ml[i] = load_words(element_ml + i * kGroups * slice_rows);
      }
#pragma unroll
      for (int i = 0; i < static_cast<int>(kAtOnce); ++i) {
        if (i < n) full = full && is_full(x[i]) && is_full(ml[i]);
      }
    }
    // Read: the places are empty again for the next call.
#pragma unroll
    for (int i = 0; i < static_cast<int>(kAtOnce); ++i) {
      if (i >= n) continue;
      store_words(element + static_cast<std::int64_t>(i * kGroups) * capacity, {empty, empty, empty, empty});
      if (is_first_of_row) store_words(element_ml + i * kGroups * slice_rows, make_float2(empty, empty));
    }
    join(a, x, ml, n);
    element += static_cast<std::int64_t>(kAtOnce * kGroups) * capacity;
    element_ml += kAtOnce * kGroups * slice_rows;
  }
  join_lanes<kSlice, 32>(a);
  auto* const sums = reinterpret_cast<float4*>(area.x);  // [kWarps][kSlice + 1]: the warps' partials are used up
  auto* const sums_ml = reinterpret_cast<float2*>(sums + K::kWarps * (kSlice + 1));
  const unsigned place = threadIdx.x / 32 * (kSlice + 1) + at;
  __syncthreads();
  if (threadIdx.x % 32 < kSlice) {
    sums[place] = a.x;
    sums_ml[place] = make_float2(a.m, a.l);
  }
  __syncthreads();
  if (threadIdx.x / 32 >= kSlice * K::kWarps / 32) return;  // whole warps
  const unsigned sum_at = threadIdx.x / K::kWarps;
  const unsigned sum = threadIdx.x % K::kWarps * (kSlice + 1) + sum_at;
  a = {sums[sum], sums_ml[sum].x, sums_ml[sum].y};
  join_lanes<1, K::kWarps>(a);
  const unsigned sum_e = slice * kSlice + sum_at;
  if (sum_e < elements && threadIdx.x % K::kWarps == 0) finish<K>(p, w, sum_e, row_elements, a);
}

/// Blocks of a stream write their partials to the workspace. Those that took the last tickets wait for the others and join
/// slices. Whoever holds an earlier ticket is running already, so waiting keeps nobody from a place on the device.
template <class K>
__device__ __forceinline__ void join_workspace(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                               unsigned row_elements, int ticket) {
  const unsigned elements = w.num_rows * row_elements;
  const unsigned capacity = (K::kPlain ? kPlainRows : p.shape.place_rows) * row_elements;
  const unsigned splits = p.shape.num_splits;
  const unsigned slice_rows = K::kPlain ? 1 : p.shape.slice_rows;
  auto* const partials = reinterpret_cast<float4*>(p.partial_o) + w.stream * splits * capacity;
  float2* const ml = p.partial_ml + w.stream * slices_of(static_cast<int>(capacity)) * splits * slice_rows;
  for_elements<K>(elements, [&](unsigned e) {
    const unsigned row = e / row_elements;
    const unsigned column = e % row_elements;
    Partial a = join_warps<K>(area, row, column * 4);
    a.x = {without_empty_word(a.x.x), without_empty_word(a.x.y), without_empty_word(a.x.z), without_empty_word(a.x.w)};
    store_words(partials + static_cast<std::int64_t>(w.split) * capacity + e, a.x);
    if (e % kSlice == 0 || column == 0) {
      const unsigned slice = e / kSlice;
      const std::int64_t at =
          static_cast<std::int64_t>(slice * splits + w.split) * slice_rows + row - first_row_of(slice, row_elements);
      store_words(ml + at, make_float2(without_empty_word(a.m), without_empty_word(a.l)));
    }
  });
  const int slices = slices_of(static_cast<int>(elements));
  const int joiners = min(min(p.shape.join_blocks, slices), w.num_splits);
  const int joiner = ticket - (w.num_splits - joiners);
  if (joiner < 0) return;
#pragma unroll 1
  for (unsigned slice = joiner; slice < static_cast<unsigned>(slices); slice += joiners) {
    join_slice<K>(p, w, area, row_elements, slice, partials,
                  ml + static_cast<std::int64_t>(slice * splits) * slice_rows);
  }
}

/// Joins the warps' partials, which are in `area`, then those of the stream's blocks, through the workspace.
template <class K>
__device__ __forceinline__ void join_block(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                           unsigned row_elements, int ticket) {
  if (w.num_splits > 1 && ticket >= 0) {
    join_workspace<K>(p, w, area, row_elements, ticket);
    return;
  }
  for_elements<K>(w.num_rows * row_elements, [&](unsigned e) {
    Partial a = join_warps<K>(area, e / row_elements, e % row_elements * 4);
    if (ticket < 0) a.l = __uint_as_float(0x7fffffffU);  // a workspace that nobody prepared: NaN
    finish<K>(p, w, e, row_elements, a);
  });
}

}  // namespace kvonce::cuda
