// The join of a cluster's blocks: through each other's shared memory.
#pragma once

#include "cuda/merge.cuh"

namespace kvonce::cuda {

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

}  // namespace kvonce::cuda
