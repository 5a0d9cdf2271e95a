// The join by lanes (join_slice_by_lanes() in join_workspace.cuh) where every place is known before the partials are: plain decode
// with 2 to kLaneSplits splits, more than 64 dims. At 64 dims K and V are there too soon for it: H200, 64q/8kv d64, 2,048 of 131,072
// tokens: 4.88 us without, 4.98 us with.
#pragma once

#include "cuda/join_workspace.cuh"

namespace kvonce::cuda {

/// Where a thread of join_by_lanes() writes its element and finds the first slice's, and where the output of slice 0 goes.
struct LanePlaces {
  float4* own;     // its element of this block's partial
  float2* own_ml;  // of the slice that the element is in
  float4* split;   // its split's part of slice 0
  float2* ml;      // its split's maximum and sum of slice 0
  char* out;
  unsigned slices;
  unsigned joiners;
  int first_ticket;  // that joins
};

/// Worked out while K and V are on their way: code that runs once is slow.
template <class K>
__device__ __forceinline__ LanePlaces find_lane_places(const AttendParams& p, const BlockWork& w,
                                                       unsigned row_elements) {
  static_assert(K::kThreads == kLaneSplits * kSlice);
  const unsigned capacity = kPlainRows * row_elements;
  const unsigned splits = p.shape.num_splits;
  const unsigned lane = threadIdx.x % kLaneSplits;
  const unsigned element = threadIdx.x / kLaneSplits;  // of a slice
  // A lane without a split takes the first one's words, with weight 0.
  const unsigned split = static_cast<int>(lane) < w.num_splits ? lane : 0;
  auto* const partials = reinterpret_cast<float4*>(p.partial_o) + w.stream * splits * capacity;
  float2* const ml = p.partial_ml + w.stream * (capacity / kSlice) * splits;
  LanePlaces at;
  at.own = partials + (w.split * capacity + threadIdx.x);
  at.own_ml = ml + (threadIdx.x / kSlice * splits + w.split);
  at.split = partials + (split * capacity + element);
  at.ml = ml + split;
  // Which of the element's dims this lane has in the end.
  const unsigned dim = element * 4 + (lane / 8 * 2 + lane / 4 % 2);
  at.out = static_cast<char*>(p.out) +
           sizeof(typename K::Out) * (w.seq * p.out_seq + w.kv_head * p.group_size * p.out_head + dim);
  at.slices = w.num_rows * row_elements / kSlice;
  at.joiners = joiners_of(p, w, row_elements);
  at.first_ticket = w.num_splits - static_cast<int>(at.joiners);
  asm volatile("" ::"l"(at.own), "l"(at.own_ml), "l"(at.split), "l"(at.ml), "l"(at.out), "r"(at.slices),
               "r"(at.joiners), "r"(at.first_ticket));
  return at;
}

/// As join_slice_by_lanes(). All warps read a split's maximum and sum: the first one empties them when the whole block has them, and
/// after the last slice only the first one waits for that.
template <class K>
__device__ __forceinline__ void join_slice_at(const AttendParams& p, const BlockWork& w, unsigned row_elements,
                                              const LanePlaces& at, unsigned slice, bool is_last) {
  using Out = typename K::Out;
  const unsigned lane = threadIdx.x % kLaneSplits;
  const unsigned slices_of_row = row_elements / kSlice;
  const unsigned row = slice / slices_of_row;
  const unsigned column = slice % slices_of_row * kSlice * 4;
  auto* const out = reinterpret_cast<Out*>(at.out) + (row * p.out_head + column);
  float2* const ml_from = at.ml + slice * p.shape.num_splits;
  float4* const x_from = at.split + slice * kSlice;
  float4 x;
  float2 ml;
  bool full = false;
  do {
    x = load_words(x_from);
    ml = load_words(ml_from);
    full = is_full(x) && is_full(ml);
  } while (__any_sync(kAllLanes, !full));
  const bool has_split = static_cast<int>(lane) < w.num_splits;
  // All lanes of the warp have splits of one row.
  const float shift = max_of_warp(ml.x);
  const float f = has_split ? exp2_approx(ml.x - shift) : 0.0F;
  float l = has_split ? ml.y * f : 0.0F;
  const bool second = lane / 8 != 0;
  const bool odd = lane / 4 % 2 != 0;
  x = has_split ? float4{x.x * f, x.y * f, x.z * f, x.w * f} : float4{0.0F, 0.0F, 0.0F, 0.0F};
  const float low = (second ? x.z : x.x) + __shfl_xor_sync(kAllLanes, second ? x.x : x.z, 8);
  const float high = (second ? x.w : x.y) + __shfl_xor_sync(kAllLanes, second ? x.y : x.w, 8);
  float sum = (odd ? high : low) + __shfl_xor_sync(kAllLanes, odd ? low : high, 4);
#pragma unroll
  for (unsigned step = 8; step > 0; step /= 2) {
    l += __shfl_xor_sync(kAllLanes, l, step);
    if (step < 4) sum += __shfl_xor_sync(kAllLanes, sum, step);
  }
  if (lane % 4 == 0) {
    const float scale = l == 0.0F ? 0.0F : reciprocal_approx(l);  // l is 0 or at least 1
    *out = Out(sum * scale);
  }
  const float empty = __uint_as_float(kEmptyWord);
  if (has_split) store_words(x_from, {empty, empty, empty, empty});
  if (is_last && threadIdx.x >= 32) {
    arrive_at_block_barrier(1, K::kThreads);
  } else {
    wait_at_block_barrier(1, K::kThreads);
    if (static_cast<int>(threadIdx.x) < w.num_splits) store_words(ml_from, make_float2(empty, empty));
  }
  if (p.lse != nullptr && threadIdx.x == 0 && column == 0) {
    p.lse[w.seq * p.lse_seq + (w.kv_head * p.group_size + row) * p.lse_head] =
        l == 0.0F ? -INFINITY : (shift + log2f(l)) * shared::kLn2;
  }
}

/// Joins the warps' partials, which are in `area`, then those of the stream's blocks.
template <class K>
__device__ __forceinline__ void join_by_lanes(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                              unsigned row_elements, const LanePlaces& at, const JoinTurn& turn) {
  const unsigned e = threadIdx.x;
  if (e / kSlice < at.slices) {
    Partial a = join_warps<K>(area, e / row_elements, e % row_elements * 4);
    a.x = {without_empty_word(a.x.x), without_empty_word(a.x.y), without_empty_word(a.x.z), without_empty_word(a.x.w)};
    if (turn.ticket == kUnprepared) {
      a.l = __uint_as_float(0x7fffffffU);  // NaN
      finish<K>(p, w, e, row_elements, a);
      return;
    }
    store_words(at.own, a.x);
    if (e % kSlice == 0) store_words(at.own_ml, make_float2(without_empty_word(a.m), without_empty_word(a.l)));
  }
  if (turn.ticket < at.first_ticket) return;
  unsigned joiner = turn.ticket - at.first_ticket;
  unsigned left = 0;
  if (turn.ticket == w.num_splits - 1) {
    left = turn.left;
    if (threadIdx.x == 0) store_word(p.tickets + w.stream, 0);
  }
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (unsigned slice = joiner; slice < at.slices; slice += at.joiners) {
      join_slice_at<K>(p, w, row_elements, at, slice, left == 0 && slice + at.joiners >= at.slices);
    }
    if (left == 0) return;
    joiner = take_joiner(left);
  }
}

}  // namespace kvonce::cuda
