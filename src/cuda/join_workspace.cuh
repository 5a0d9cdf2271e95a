// The join of a stream's blocks through the workspace: those that started last wait for the others, once all have started.
#pragma once

#include "cuda/merge.cuh"

namespace kvonce::cuda {

/// What thread 0 asks for at the start and before the end, and needs at the end: words of AttendParams::tickets.
struct Ticket {
  std::uint32_t prepared = kPreparedWord;
  std::uint64_t before = 0;  // this block started
  std::uint64_t later = 0;
  bool waits = false;  // joins, and not as the last to start
};

/// A block's part in the join.
struct JoinTurn {
  int ticket;     // the order in which a stream's blocks start; kLeaves, kUnprepared
  unsigned left;  // of the last one: joiners whose slices it joins beside its own, a bit each
};
constexpr int kUnprepared = -1;  // a workspace that nobody prepared
constexpr int kLeaves = -2;      // another block joins this one's slices

/// Blocks that join a stream's partials: those with the last tickets.
__device__ __forceinline__ int joiners_of(const AttendParams& p, const BlockWork& w, unsigned row_elements) {
  return min(min(p.shape.join_blocks, slices_of(static_cast<int>(w.num_rows * row_elements))), w.num_splits);
}

/// Takes this block's place in the order in which the blocks of its stream start. Nothing waits for the answer here.
__device__ __forceinline__ Ticket take_ticket(const AttendParams& p, const BlockWork& w, unsigned thread = 0) {
  Ticket ticket;
  const int ask = threadIdx.x == thread && w.num_splits > 1 ? 1 : 0;
  asm volatile(
      "{\n\t"
      ".reg .pred ask;\n\t"
      "setp.ne.s32 ask, %2, 0;\n\t"
      "@ask ld.relaxed.gpu.global.u32 %0, [%3];\n\t"
      "@ask atom.relaxed.gpu.global.add.u64 %1, [%4], %5;\n\t"
      "}"
      : "+r"(ticket.prepared), "+l"(ticket.before)
      : "r"(ask), "l"(p.header), "l"(p.tickets + w.stream), "l"(std::uint64_t{1})
      : "memory");
  return ticket;
}

/// A joining block asks who has started since: all, as a rule. To be called where K and V are waited for anyway.
/// first: the first ticket that joins.
__device__ __forceinline__ void ask_again(const AttendParams& p, const BlockWork& w, int first, Ticket& ticket,
                                          unsigned thread = 0) {
  const int number = static_cast<int>(ticket.before);
  ticket.waits = threadIdx.x == thread && w.num_splits > 1 && number >= first && number < w.num_splits - 1;
  asm volatile(
      "{\n\t"
      ".reg .pred ask;\n\t"
      "setp.ne.s32 ask, %1, 0;\n\t"
      "@ask ld.relaxed.gpu.global.u64 %0, [%2];\n\t"
      "}"
      : "+l"(ticket.later)
      : "r"(ticket.waits ? 1 : 0), "l"(p.tickets + w.stream));
}

/// Who holds `ticket` sees from the word whether all have started: it counts them, and the last one to start empties it.
__device__ __forceinline__ bool have_all_started(std::uint64_t word, int ticket, int num_splits) {
  const int started = static_cast<int>(word);
  return started >= num_splits || started <= ticket;
}

/// A joining block that finds some unstarted gives them a while, then leaves its slices to the one that will start last: nobody may
/// keep a place on the device from those it waits for. The word changes hands at once with the count, so the last one knows.
__device__ __forceinline__ bool waits_for_start(std::uint64_t* word, int ticket, int num_splits, int joiner) {
  constexpr std::uint64_t kPatienceNs = 20000;
  const std::uint64_t begin = global_nanoseconds();
  std::uint64_t now = load_word(word);
  while (!have_all_started(now, ticket, num_splits)) {
    if (global_nanoseconds() - begin < kPatienceNs) {
      now = load_word(word);
      continue;
    }
    const std::uint64_t found = swap_word(word, now, now | std::uint64_t{1} << (32 + joiner));
    if (found == now) return false;
    now = found;
  }
  return true;
}

/// By the thread that took the ticket, before the block joins. Writes `left` for the last ticket only, which alone reads it.
__device__ __forceinline__ int settle_ticket(const AttendParams& p, const BlockWork& w, const Ticket& ticket, int first,
                                             unsigned& left) {
  if (ticket.prepared != kPreparedWord) return kUnprepared;
  const int number = static_cast<int>(ticket.before);
  if (ticket.waits && !have_all_started(ticket.later, number, w.num_splits) &&
      !waits_for_start(p.tickets + w.stream, number, w.num_splits, number - first)) {
    return kLeaves;
  }
  if (number == w.num_splits - 1) left = static_cast<unsigned>(ticket.before >> 32);
  return number;
}

/// What a joining block owns of a stream's partials in the workspace: slices first, first + joiners, ...
struct Joiner {
  float4* partials;  // [num_splits][capacity]
  float2* ml;        // [slices][num_splits][slice_rows]
  unsigned elements;
  unsigned capacity;
  unsigned slice_rows;
  unsigned first;
  unsigned joiners;
};

/// The next joiner among those that left.
__device__ __forceinline__ unsigned take_joiner(unsigned& left) {
  const unsigned joiner = __ffs(static_cast<int>(left)) - 1;
  left &= left - 1;
  return joiner;
}

/// Polls until `lanes` of the warp have their first n of kCount partials, then leaves the places empty for the next call.
/// A row's maximum and sum are read by the kSlice lanes of a slice: emptied, by one of them, when all have them.
template <int kCount>
__device__ __forceinline__ void take_partials(unsigned lanes, int n, float4* from, std::int64_t stride, float2* ml_from,
                                              std::int64_t ml_stride, bool empties_ml, float4 (&x)[kCount],
                                              float2 (&ml)[kCount]) {
  bool full = false;
  while (__any_sync(lanes, !full)) {
    full = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= n) continue;
      x[i] = load_words(from + i * stride);
      ml[i] = load_words(ml_from + i * ml_stride);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < n) full = full && is_full(x[i]) && is_full(ml[i]);
    }
  }
  const float empty = __uint_as_float(kEmptyWord);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i >= n) continue;
    store_words(from + i * stride, {empty, empty, empty, empty});
    if (empties_ml) store_words(ml_from + i * ml_stride, make_float2(empty, empty));
  }
}

/// Up to kFewSplits splits: a thread takes an element, all splits at once.
template <class K>
__device__ __forceinline__ void join_few(const AttendParams& p, const BlockWork& w, unsigned row_elements,
                                         const Joiner& j) {
  const unsigned slices = slices_of(static_cast<int>(j.elements));
  const unsigned items = (slices - j.first + j.joiners - 1) / j.joiners * kSlice;
#pragma unroll 1
  for (unsigned item = threadIdx.x; item < items; item += K::kThreads) {
    const unsigned slice = j.first + item / kSlice * j.joiners;
    const unsigned e = slice * kSlice + item % kSlice;
    const bool exists = K::kPlain || e < j.elements;
    const int n = exists ? w.num_splits : 0;
    const unsigned slice_row = exists && !K::kPlain ? e / row_elements - first_row_of(slice, row_elements) : 0;
    float4* const x_at = j.partials + e;
    float2* const ml_at = j.ml + static_cast<std::int64_t>(slice * p.shape.num_splits) * j.slice_rows + slice_row;
    float4 x[kFewSplits];
    float2 ml[kFewSplits];
    const unsigned lanes = item - item % 32 + 32 <= items ? kAllLanes : kAllLanes >> kSlice;
    take_partials(lanes, n, x_at, j.capacity, ml_at, j.slice_rows, e % kSlice == 0 || e % row_elements == 0, x, ml);
    Partial a;
    join(a, x, ml, n);
    if (exists) finish<K>(p, w, e, row_elements, a);
  }
}

/// Waits for the maxima of all splits' first row of a slice. Blocks that wait for partials of many rows keep the memory busy for those
/// that still read K and V: they look at one word pair of each split until all are there. H200, 32q/4kv d128, 32,768 tokens, q_len 4:
/// 24.6 us without, 23.1 us with.
template <class K>
__device__ __forceinline__ void wait_for_maxima(int num_splits, const float2* maxima, unsigned stride) {
  for (int split = static_cast<int>(threadIdx.x); split < num_splits; split += K::kThreads) {
    while (!is_full(load_words(maxima + static_cast<std::int64_t>(split) * stride))) {
    }
  }
  __syncthreads();
}

/// K::kJoinedSlices neighbouring slices of the output, from the workspace. Groups of threads take the splits in turn, a thread an
/// element: a split's part of a slice is 256 neighbouring bytes. Then the groups' sums meet in shared memory.
template <class K>
__device__ __forceinline__ void join_slice(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                           unsigned row_elements, const Joiner& j, unsigned first) {
  constexpr unsigned kWidth = kSlice * K::kJoinedSlices;
  constexpr unsigned kGroups = K::kThreads / kWidth;
  constexpr unsigned kAtOnce = 32 * K::kJoinedSlices / K::kWarps;  // loads in flight
  const unsigned elements = j.elements;
  const unsigned capacity = j.capacity;
  const unsigned slice_rows = j.slice_rows;
  const unsigned group = threadIdx.x / kWidth;
  const unsigned at = threadIdx.x % kWidth;
  const unsigned e = first * kSlice + at;
  const unsigned slice = first + at / kSlice;
  const bool exists = K::kPlain || e < elements;
  const unsigned slice_row = K::kPlain ? 0 : e / row_elements - first_row_of(slice, row_elements);
  const bool is_first_of_row = at % kSlice == 0 || (!K::kPlain && e % row_elements == 0);
  const unsigned sum_at = threadIdx.x / K::kWarps;
  const unsigned sum_e = first * kSlice + sum_at;
  OutPlace to;
  if constexpr (K::kGroups) {
    to = place_element<K>(p, w, sum_e, row_elements);
    asm volatile("" ::"l"(to.at), "r"(to.row.head), "r"(to.row.query));  // before the wait
    wait_for_maxima<K>(w.num_splits, j.ml + static_cast<std::int64_t>(first * p.shape.num_splits) * slice_rows,
                       slice_rows);
  }
  Partial a;
  float4* element = j.partials + static_cast<std::int64_t>(group) * capacity + e;
  float2* element_ml = j.ml + static_cast<std::int64_t>(slice * p.shape.num_splits + group) * slice_rows + slice_row;
#pragma unroll 1
  for (int from = 0; from < w.num_splits; from += kAtOnce * kGroups) {
    const int n = exists ? (w.num_splits - from - static_cast<int>(group) + static_cast<int>(kGroups) - 1) /
                               static_cast<int>(kGroups)
                         : 0;
    float4 x[kAtOnce];
    float2 ml[kAtOnce];
    take_partials(kAllLanes, n, element, static_cast<std::int64_t>(kGroups) * capacity, element_ml,
                  static_cast<std::int64_t>(kGroups) * slice_rows, is_first_of_row, x, ml);
    join(a, x, ml, n);
    element += static_cast<std::int64_t>(kAtOnce * kGroups) * capacity;
    element_ml += kAtOnce * kGroups * slice_rows;
  }
  join_lanes<kWidth, 32>(a);
  auto* const sums = reinterpret_cast<float4*>(area.x);  // [kWarps][kWidth + 1]: the warps' partials are used up
  auto* const sums_ml = reinterpret_cast<float2*>(sums + K::kWarps * (kWidth + 1));
  const unsigned place = threadIdx.x / 32 * (kWidth + 1) + at;
  __syncthreads();
  if (threadIdx.x % 32 < kWidth) {
    sums[place] = a.x;
    sums_ml[place] = make_float2(a.m, a.l);
  }
  __syncthreads();
  if (threadIdx.x / 32 >= kWidth * K::kWarps / 32) return;  // whole warps
  const unsigned sum = threadIdx.x % K::kWarps * (kWidth + 1) + sum_at;
  a = {sums[sum], sums_ml[sum].x, sums_ml[sum].y};
  join_lanes<1, K::kWarps>(a);
  if (sum_e >= elements || threadIdx.x % K::kWarps != 0) return;
  if constexpr (!K::kGroups) to = place_element<K>(p, w, sum_e, row_elements);
  finish<K>(p, w, to, a);
}

/// Splits that join_slice_by_lanes() takes.
constexpr unsigned kLaneSplits = 16;

/// Plain decode with up to kLaneSplits splits: a slice by half warps, an element by 16 lanes, each of which has a split. Nothing goes
/// through shared memory. All warps read a split's maximum and sum: emptied when the whole block has them.
template <class K>
__device__ __forceinline__ void join_slice_by_lanes(const AttendParams& p, const BlockWork& w, unsigned row_elements,
                                                    const Joiner& j, unsigned slice) {
  using Out = typename K::Out;
  static_assert(K::kThreads == kLaneSplits * kSlice);
  const unsigned lane = threadIdx.x % kLaneSplits;
  const unsigned e = slice * kSlice + threadIdx.x / kLaneSplits;
  const RowPlace place = place_of<true>(p, w, static_cast<int>(e / row_elements));
  // Which of the element's dims this lane has in the end.
  const unsigned dim = e % row_elements * 4 + (lane / 8 * 2 + lane / 4 % 2);
  Out* const out = static_cast<Out*>(p.out) + (w.seq * p.out_seq + place.head * p.out_head + dim);
  asm volatile("" ::"l"(out));  // before the wait
  float2* const ml_of_slice = j.ml + static_cast<std::int64_t>(slice) * p.shape.num_splits;
  const int n = static_cast<int>(lane) < w.num_splits ? 1 : 0;
  float4 taken[1];
  float2 taken_ml[1];
  take_partials(kAllLanes, n, j.partials + static_cast<std::int64_t>(lane) * j.capacity + e, 0, ml_of_slice + lane, 0,
                false, taken, taken_ml);
  Partial a;
  if (n == 1) a = {taken[0], taken_ml[0].x, taken_ml[0].y};
  // All lanes of the warp have splits of one row.
  const float shift = max_of_warp(a.m);
  const float f = exp2_approx(a.m - shift);
  float l = a.l * f;
  const bool second = lane / 8 != 0;
  const bool odd = lane / 4 % 2 != 0;
  a.x = {a.x.x * f, a.x.y * f, a.x.z * f, a.x.w * f};
  const float low = (second ? a.x.z : a.x.x) + __shfl_xor_sync(kAllLanes, second ? a.x.x : a.x.z, 8);
  const float high = (second ? a.x.w : a.x.y) + __shfl_xor_sync(kAllLanes, second ? a.x.y : a.x.w, 8);
  float x = (odd ? high : low) + __shfl_xor_sync(kAllLanes, odd ? low : high, 4);
#pragma unroll
  for (unsigned step = 8; step > 0; step /= 2) {
    l += __shfl_xor_sync(kAllLanes, l, step);
    if (step < 4) x += __shfl_xor_sync(kAllLanes, x, step);
  }
  if (lane % 4 == 0) {
    const float scale = l == 0.0F ? 0.0F : reciprocal_approx(l);  // l is 0 or at least 1
    *out = Out(x * scale);
    if (p.lse != nullptr && dim == 0) {
      p.lse[w.seq * p.lse_seq + place.head * p.lse_head] = l == 0.0F ? -INFINITY : (shift + log2f(l)) * shared::kLn2;
    }
  }
  __syncthreads();
  const float empty = __uint_as_float(kEmptyWord);
  if (static_cast<int>(threadIdx.x) < w.num_splits) store_words(ml_of_slice + threadIdx.x, make_float2(empty, empty));
}

/// Blocks of a stream write their partials to the workspace. Those that took the last tickets wait for the others and join
/// slices, or have left when some had not started: waiting keeps nobody from a place on the device.
template <class K, Join kJoin>
__device__ __forceinline__ void join_workspace(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                               unsigned row_elements, const JoinTurn& turn) {
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
  const int joiners = joiners_of(p, w, row_elements);
  const int joiner = turn.ticket - (w.num_splits - joiners);
  if (joiner < 0) return;
  Joiner j = {
      partials, ml, elements, capacity, slice_rows, static_cast<unsigned>(joiner), static_cast<unsigned>(joiners)};
  unsigned left = 0;
  if (turn.ticket == w.num_splits - 1) {
    left = turn.left;
    if (threadIdx.x == 0) store_word(p.tickets + w.stream, 0);
  }
#pragma unroll 1
  while (true) {
    if constexpr (kJoin == kJoinFew) {
      join_few<K>(p, w, row_elements, j);
    } else if constexpr (K::kByLanes) {
#pragma unroll 1
      for (unsigned slice = j.first; slice < static_cast<unsigned>(slices); slice += j.joiners) {
        join_slice_by_lanes<K>(p, w, row_elements, j, slice);
      }
    } else {
#pragma unroll 1
      for (unsigned slice = j.first * K::kJoinedSlices; slice < static_cast<unsigned>(slices);
           slice += j.joiners * K::kJoinedSlices) {
        join_slice<K>(p, w, area, row_elements, j, slice);
      }
    }
    if (left == 0) return;
    j.first = take_joiner(left);
  }
}

/// Joins the warps' partials, which are in `area`, then those of the stream's blocks, through the workspace.
template <class K, Join kJoin>
__device__ __forceinline__ void join_block(const AttendParams& p, const BlockWork& w, const MergeArea& area,
                                           unsigned row_elements, const JoinTurn& turn) {
  if (w.num_splits > 1 && turn.ticket != kUnprepared) {
    join_workspace<K, kJoin>(p, w, area, row_elements, turn);
    return;
  }
  for_elements<K>(w.num_rows * row_elements, [&](unsigned e) {
    Partial a = join_warps<K>(area, e / row_elements, e % row_elements * 4);
    if (turn.ticket == kUnprepared) a.l = __uint_as_float(0x7fffffffU);  // NaN
    finish<K>(p, w, e, row_elements, a);
  });
}

}  // namespace kvonce::cuda
