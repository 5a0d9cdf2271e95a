// Joins a row's partials over all chunks, with the row's sink, into out and lse. One threadgroup per row; a partial without
// weight has its o not read.
#pragma once

#include "metal/work.metal.h"

namespace kvonce_metal {

struct MergeBuffers {
  KV_DEVICE const float* partial_o;
  KV_DEVICE const float* partial_sums;
  KV_DEVICE const float* sinks;
  KV_DEVICE const int64_t* params;
};

/// shared: float[merge_shared_floats(merge_simdgroups, kDimV)].
template <typename T, int kDimV>
KV_FN void merge_partials(KV_THREAD const MergeBuffers& b, KV_DEVICE T* out, KV_DEVICE float* lse,
                          KV_THREADGROUP float* shared, KV_THREAD const Place& place) {
  enum : int { kCount = (kDimV + 31) / 32 };
  const int num_chunks = param(b.params, kNumChunks);
  const int num_simdgroups = param(b.params, kMergeSimdgroups);
  const int64_t row = place.x;                                          // in [num_seqs, num_q_heads, q_len]
  KV_DEVICE const float* sums = b.partial_sums + row * num_chunks * 2;  // [num_chunks, 2]: m, l

  // The largest score and the sum of weights, in every simdgroup. The sink is one more score.
  const float sink =
      b.params[kHasSinks] != 0 ? b.sinks[row / b.params[kQLen] % b.params[kNumQHeads]] * KV_LOG2E : KV_HIDDEN;
  float high = sink < KV_LOWEST ? KV_HIDDEN : sink;
  for (int chunk = place.lane; chunk < num_chunks; chunk += kLanes) high = larger(high, sums[chunk * 2]);
  high = max_lanes(high);
  float sum = 0.0f;
  for (int chunk = place.lane; chunk < num_chunks; chunk += kLanes) {
    sum = multiply_add(exp2_fast(sums[chunk * 2] - high), sums[chunk * 2 + 1], sum);
  }
  sum = sum_lanes(sum) + weight_of(sink, high);

  float o[kCount];
  KV_UNROLL
  for (int e = 0; e < kCount; e++) o[e] = 0.0f;
  for (int chunk = place.simdgroup; chunk < num_chunks; chunk += num_simdgroups) {
    const float weight = exp2_fast(sums[chunk * 2] - high) * sums[chunk * 2 + 1];
    if (weight == 0.0f) continue;
    KV_DEVICE const float* from = b.partial_o + (row * num_chunks + chunk) * kDimV;
    KV_UNROLL
    for (int e = 0; e < kCount; e++) {
      const int dim = place.lane + kLanes * e;
      if (dim < kDimV) o[e] = multiply_add(weight, from[dim], o[e]);
    }
  }
  KV_UNROLL
  for (int e = 0; e < kCount; e++) {
    const int dim = place.lane + kLanes * e;
    if (dim < kDimV) shared[place.simdgroup * kDimV + dim] = o[e];
  }
  barrier();
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int dim = place.simdgroup * kLanes + place.lane; dim < kDimV; dim += num_simdgroups * kLanes) {
    float total = 0.0f;
    for (int i = 0; i < num_simdgroups; i++) total += shared[i * kDimV + dim];
    out[row * kDimV + dim] = T(total * inverse);
  }
  if (place.simdgroup == 0 && place.lane == 0) lse[row] = sum == 0.0f ? -INFINITY : (high + log2_of(sum)) * KV_LN2;
}

}  // namespace kvonce_metal
