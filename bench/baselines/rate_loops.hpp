// What a core can do when memory plays no part: multiply-adds from registers, exponentials from L1. And the dense
// matrix-vector product. Included only by target translation units.
#pragma once

#include <cstdint>

#include "baselines/target_kernels.hpp"
#include "cpu/simd/unroll.hpp"

namespace kvonce::bench {
namespace {

// Twelve independent chains cover a latency of 4 to 5 cycles on two pipes and leave room for the operands in 16 registers.
constexpr int kMaddChains = 12;

/// sum = sum * factor + addend in every lane of every chain. The chain runs through the multiplication, so that a
/// compiler without fused multiply-add cannot lift the product out of the loop.
template <class S>
float run_madds(std::int64_t iterations) {
  volatile float factor_source = 0.999F;
  volatile float addend_source = 0.001F;
  const typename S::Vec factor = S::broadcast(factor_source);
  const typename S::Vec addend = S::broadcast(addend_source);
  typename S::Vec sums[kMaddChains];
  KVONCE_UNROLL
  for (int c = 0; c < kMaddChains; ++c) sums[c] = S::broadcast(addend_source * static_cast<float>(c));
  for (std::int64_t i = 0; i < iterations; ++i) {
    KVONCE_UNROLL
    for (int c = 0; c < kMaddChains; ++c) sums[c] = S::fmadd(sums[c], factor, addend);
  }
  typename S::Vec total = sums[0];
  KVONCE_UNROLL
  for (int c = 1; c < kMaddChains; ++c) total = S::add(total, sums[c]);
  float lanes[S::width];
  S::store(lanes, total);
  float result = 0.0F;
  for (const float lane : lanes) result += lane;
  return result;
}

template <class S>
void exp2_array(const float* in, float* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 4 * S::width) {
    KVONCE_UNROLL
    for (int j = 0; j < 4; ++j) S::store(out + i + j * S::width, S::exp2(S::load(in + i + j * S::width)));
  }
}

/// kRows rows side by side share each load of x; the rows below are prefetched as these are used.
template <class S, int kRows>
void multiply_rows(const std::uint16_t* matrix, const float* x, std::int64_t num_cols, bool prefetch, float* y) {
  using Elements = typename S::template Elements<KvFormat::f16>;
  typename S::Vec sums[kRows][2];
  KVONCE_UNROLL
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = S::zero();
  for (std::int64_t col = 0; col < num_cols; col += 2 * S::width) {
    const typename S::Vec x_a = S::load(x + col);
    const typename S::Vec x_b = S::load(x + col + S::width);
    KVONCE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const std::uint16_t* const at = matrix + r * num_cols + col;
      if (prefetch) S::prefetch(at + kRows * num_cols);
      typename S::Vec a;
      typename S::Vec b;
      Elements::load_pair(at, a, b);
      sums[r][0] = S::fmadd(x_a, a, sums[r][0]);
      sums[r][1] = S::fmadd(x_b, b, sums[r][1]);
    }
  }
  KVONCE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    float lanes[S::width];
    S::store(lanes, S::add(sums[r][0], sums[r][1]));
    y[r] = 0.0F;
    for (const float lane : lanes) y[r] += lane;
  }
}

template <class S>
void multiply_matrix(const QmvTask& task) {
  constexpr int kRows = 4;
  std::int64_t row = 0;
  for (; row + kRows <= task.num_rows; row += kRows) {
    const bool prefetch = row + 2 * kRows <= task.num_rows;
    multiply_rows<S, kRows>(task.matrix + row * task.num_cols, task.x, task.num_cols, prefetch, task.y + row);
  }
  for (; row < task.num_rows; ++row) {
    multiply_rows<S, 1>(task.matrix + row * task.num_cols, task.x, task.num_cols, false, task.y + row);
  }
}

}  // namespace
}  // namespace kvonce::bench
