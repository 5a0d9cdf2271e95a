// What    Joins the chunk partials of some rows of one KV stream into the caller's out and lse.
// Shapes  partial_o [chunk][rows_per_stream][padded head_dim_v], partial_lse [chunk][rows_per_stream]; out in the
//         caller's strides.
// Order   always chunk 0, 1, 2, ...: the bits do not depend on which worker merges or when.
// Formula lse = log(sum exp(lse_c) + exp(sink)); o = sum exp(lse_c - lse) o_c  (shared/partial.h)
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/task.hpp"
#include "shared/partial.h"

namespace kvonce::cpu {

template <class S, DType dtype>
void merge_row(const float* partial_o, const float* weights, const MergeTask& task, void* out) {
  using Vec = typename S::Vec;
  constexpr std::int64_t kBytes = dtype == DType::f32 ? 4 : 2;
  const std::int64_t dims = task.head_dim_v;
  const std::int64_t stride = task.rows_per_stream * round_up(dims, kPadFloats);
  for (std::int64_t dim = 0; dim < dims; dim += S::width) {
    Vec acc = S::zero();
    for (std::int64_t c = 0; c < task.num_chunks; ++c) {
      acc = S::fmadd(S::load(partial_o + c * stride + dim), S::broadcast(weights[c * task.rows_per_stream]), acc);
    }
    const std::int64_t count = dims - dim < S::width ? dims - dim : S::width;
    S::template store_as<dtype>(static_cast<char*>(out) + dim * kBytes, acc, count);
  }
}

template <class S>
void merge_rows(const MergeTask& task) {
  for (std::int64_t r = 0; r < task.num_rows; ++r) {
    const std::int64_t row = task.row_begin + r;
    const std::int64_t head = row % task.group_size;
    const std::int64_t token = row / task.group_size;
    float* weights = task.partial_lse + row;  // of chunk c at weights[c * rows_per_stream]
    const float sink = task.sinks != nullptr ? task.sinks[head] : -INFINITY;
    float max_lse = sink;
    const std::int64_t end = task.num_chunks * task.rows_per_stream;
    for (std::int64_t c = 0; c < end; c += task.rows_per_stream) max_lse = weights[c] > max_lse ? weights[c] : max_lse;
    const float shift = shared::merge_shift(max_lse);
    float sum = ::expf(sink - shift);
    for (std::int64_t c = 0; c < end; c += task.rows_per_stream) {
      weights[c] = ::expf(weights[c] - shift);
      sum += weights[c];
    }
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
    for (std::int64_t c = 0; c < end; c += task.rows_per_stream) weights[c] *= inverse;

    const float* partial_o = task.partial_o + row * round_up(task.head_dim_v, kPadFloats);
    const std::int64_t out_offset = token * task.out_token_stride + head * task.out_head_stride;
    switch (task.out_dtype) {
      case DType::f32:
        merge_row<S, DType::f32>(partial_o, weights, task, static_cast<float*>(task.out) + out_offset);
        break;
      case DType::f16:
        merge_row<S, DType::f16>(partial_o, weights, task, static_cast<std::uint16_t*>(task.out) + out_offset);
        break;
      case DType::bf16:
        merge_row<S, DType::bf16>(partial_o, weights, task, static_cast<std::uint16_t*>(task.out) + out_offset);
        break;
    }
    if (task.lse != nullptr) {
      task.lse[token * task.lse_token_stride + head * task.lse_head_stride] = shared::merged_lse(shift, sum);
    }
  }
}

}  // namespace kvonce::cpu
