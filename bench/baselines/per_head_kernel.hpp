// What: attention of one query row by itself, the form of MLX's two-pass vector kernel: K and V are streamed for every
//   query head anew, so the heads of a group fetch the same bytes group_size times. The baseline of every comparison.
// Shapes: q [head_dim_qk], K [tokens, head_dim_qk], V [tokens, head_dim_v], o [head_dim_v]; token strides are free.
// Work split: one worker per (row, block); a row's token steps are dealt to its blocks in turn, a second pass merges:
//
//     tokens  | step 0 | step 1 | step 2 | step 3 | step 4 | ...
//     block        0        1        0        1        0
//
// Steps, per token step:
//   [1] q as f32, multiplied by scale * log2(e), once per worker
//   [2] scores of the step: `width` dot products side by side, one transposing reduction
//   [3] running maximum, exp2 and sum of the step
//   [4] o = o * correction + sum of probability * V, accumulators in registers over the step
//   [5] after the last step: o / sum, lse
// Bytes: num_q_heads * q_len * kv_len * (head_dim_qk + head_dim_v) * element size.
// Registers: `width` accumulators in [2], 8 in [4]. bf16 vectors hold even and odd dims apart: q and o follow that order.
// Not handled here: windows, masks, sinks, softcap, quantised caches.
#pragma once

#include <cmath>
#include <cstdint>

#include "baselines/target_kernels.hpp"
#include "cpu/simd/prefetch.hpp"
#include "cpu/simd/unroll.hpp"
#include "shared/numeric.h"
#include "shared/partial.h"

namespace kvonce::bench {
namespace {

template <class S, KvFormat kFormat>
struct PerHeadKernel {
  using Vec = typename S::Vec;
  using Elements = typename S::template Elements<kFormat>;
  using Stored = typename Elements::Stored;
  static constexpr std::int64_t kWidth = S::width;
  static constexpr std::int64_t kPair = 2 * kWidth;
  static constexpr std::int64_t kStoredBytes = sizeof(Stored);

  static float to_float(Stored value) {
    if constexpr (kFormat == KvFormat::f32) {
      return value;
    } else if constexpr (kFormat == KvFormat::f16) {
      return shared::f16_to_f32(value);
    } else {
      return shared::bf16_to_f32(value);
    }
  }

  // Where dim d lives in q and o.
  static std::int64_t position(std::int64_t d, std::int64_t dims) {
    if (!Elements::kEvenOdd || d >= dims / kPair * kPair) return d;
    return d / kPair * kPair + d % 2 * kWidth + d % kPair / 2;
  }

  // The step that follows, its rows fetched while this one is worked on.
  static cpu::StepPrefetcher<S> step_ahead(const PerHeadTask& task, std::int64_t next, const Stored* rows,
                                           std::int64_t stride, std::int64_t dims) {
    if (next >= task.token_end) return {};
    const std::int64_t left = task.token_end - next;
    const std::int64_t row_bytes = dims * kStoredBytes;
    return {rows + next * stride,
            stride * kStoredBytes,
            row_bytes,
            left < task.step_tokens ? left : task.step_tokens,
            row_bytes,
            1,
            task.prefetch_level};
  }

  // [1]
  static void load_query(const PerHeadTask& task, float* q) {
    for (std::int64_t d = 0; d < task.head_dim_qk; ++d) {
      float value = 0.0F;
      if (task.q_dtype == DType::f32) value = static_cast<const float*>(task.q)[d];
      if (task.q_dtype == DType::f16) value = shared::f16_to_f32(static_cast<const std::uint16_t*>(task.q)[d]);
      if (task.q_dtype == DType::bf16) value = shared::bf16_to_f32(static_cast<const std::uint16_t*>(task.q)[d]);
      q[position(d, task.head_dim_qk)] = value * task.scale_log2;
    }
  }

  // [2] Scores of `width` neighbouring tokens.
  static void score_tokens(const float* q, const Stored* k, std::int64_t stride, std::int64_t dims,
                           cpu::StepPrefetcher<S>& ahead, float* scores) {
    Vec sums[kWidth];
    KVONCE_UNROLL
    for (int t = 0; t < kWidth; ++t) sums[t] = S::zero();
    std::int64_t d = 0;
    for (; d + kPair <= dims; d += kPair) {
      const Vec q_a = S::load(q + d);
      const Vec q_b = S::load(q + d + kWidth);
      KVONCE_UNROLL
      for (int t = 0; t < kWidth; ++t) {
        Vec a;
        Vec b;
        Elements::load_pair(k + t * stride + d, a, b);
        sums[t] = S::fmadd(q_b, b, S::fmadd(q_a, a, sums[t]));
        if (t % 4 == 3) ahead.advance(4 * kPair * kStoredBytes);
      }
    }
    for (; d + kWidth <= dims; d += kWidth) {
      KVONCE_UNROLL
      for (int t = 0; t < kWidth; ++t) sums[t] = S::fmadd(S::load(q + d), Elements::load(k + t * stride + d), sums[t]);
    }
    S::store(scores, S::sum_lanes(sums));
    for (; d < dims; ++d) {
      for (std::int64_t t = 0; t < kWidth; ++t) scores[t] += q[d] * to_float(k[t * stride + d]);
    }
  }

  static float score_one_token(const float* q, const Stored* k, std::int64_t dims) {
    float sum = 0.0F;
    for (std::int64_t d = 0; d < dims; ++d) sum += q[position(d, dims)] * to_float(k[d]);
    return sum;
  }

  // [3] Scores to 2^(score - max_score) in place, padded with -inf to whole vectors; adds them to sums.
  static void exponentiate(float* scores, std::int64_t tokens, float max_score, Vec& sums) {
    const Vec shift = S::broadcast(max_score);
    for (std::int64_t t = 0; t < tokens; t += kWidth) {
      const Vec prob = S::exp2(S::sub(S::load(scores + t), shift));
      S::store(scores + t, prob);
      sums = S::add(sums, prob);
    }
  }

  static float first_lane(Vec v) {
    float lanes[kWidth];
    S::store(lanes, v);
    return lanes[0];
  }

  // [4] kPairs pairs of vectors of o over the step; kChains tokens side by side so that sums do not wait for each other.
  template <int kPairs, int kChains>
  static void accumulate(const float* probs, const Stored* v, std::int64_t stride, std::int64_t tokens,
                         float correction, cpu::StepPrefetcher<S>& ahead, float* o) {
    Vec sums[kChains][2 * kPairs];
    for (int i = 0; i < 2 * kPairs; ++i) {
      sums[0][i] = S::mul(S::load(o + i * kWidth), S::broadcast(correction));
      for (int c = 1; c < kChains; ++c) sums[c][i] = S::zero();
    }
    std::int64_t t = 0;
    for (; t + kChains <= tokens; t += kChains) {
      KVONCE_UNROLL
      for (int c = 0; c < kChains; ++c) add_token<kPairs>(S::broadcast(probs[t + c]), v + (t + c) * stride, sums[c]);
      ahead.advance(kChains * kPairs * kPair * kStoredBytes);
    }
    for (; t < tokens; ++t) add_token<kPairs>(S::broadcast(probs[t]), v + t * stride, sums[0]);
    for (int i = 0; i < 2 * kPairs; ++i) {
      for (int c = 1; c < kChains; ++c) sums[0][i] = S::add(sums[0][i], sums[c][i]);
      S::store(o + i * kWidth, sums[0][i]);
    }
  }

  template <int kPairs>
  static void add_token(Vec prob, const Stored* v, Vec* sums) {
    KVONCE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      Vec a;
      Vec b;
      Elements::load_pair(v + i * kPair, a, b);
      sums[2 * i] = S::fmadd(prob, a, sums[2 * i]);
      sums[2 * i + 1] = S::fmadd(prob, b, sums[2 * i + 1]);
    }
  }

  static void accumulate_step(const PerHeadTask& task, const float* probs, const Stored* v, std::int64_t tokens,
                              float correction, cpu::StepPrefetcher<S>& ahead) {
    const std::int64_t stride = task.v_token_stride;
    const std::int64_t dims = task.head_dim_v;
    std::int64_t d = 0;
    for (; d + 4 * kPair <= dims; d += 4 * kPair)
      accumulate<4, 1>(probs, v + d, stride, tokens, correction, ahead, task.o + d);
    for (; d + 2 * kPair <= dims; d += 2 * kPair)
      accumulate<2, 2>(probs, v + d, stride, tokens, correction, ahead, task.o + d);
    for (; d + kPair <= dims; d += kPair) accumulate<1, 4>(probs, v + d, stride, tokens, correction, ahead, task.o + d);
    for (; d < dims; ++d) {
      float sum = task.o[d] * correction;
      for (std::int64_t t = 0; t < tokens; ++t) sum += probs[t] * to_float(v[t * stride + d]);
      task.o[d] = sum;
    }
  }

  // [5]
  static void store_partial(const PerHeadTask& task, float max_score, float sum) {
    *task.lse = sum > 0.0F ? (max_score + std::log2(sum)) * shared::kLn2 : -INFINITY;
    const float inverse = sum > 0.0F ? 1.0F / sum : 0.0F;
    float ordered[kMaxHeadDim];
    for (std::int64_t d = 0; d < task.head_dim_v; ++d) ordered[d] = task.o[position(d, task.head_dim_v)] * inverse;
    for (std::int64_t d = 0; d < task.head_dim_v; ++d) task.o[d] = ordered[d];
  }

  static void run(const PerHeadTask& task) {
    alignas(64) float q[kMaxHeadDim];
    alignas(64) float scores[kMaxStepTokens];
    load_query(task, q);
    for (std::int64_t d = 0; d < task.head_dim_v; ++d) task.o[d] = 0.0F;
    const auto* const k_stream = static_cast<const Stored*>(task.k);
    const auto* const v_stream = static_cast<const Stored*>(task.v);
    const std::int64_t k_stride = task.k_token_stride;
    const std::int64_t jump = task.step_stride * task.step_tokens;
    float max_score = -INFINITY;
    Vec sums = S::zero();  // per lane
    for (std::int64_t begin = task.first_step * task.step_tokens; begin < task.token_end; begin += jump) {
      const std::int64_t left = task.token_end - begin;
      const std::int64_t tokens = left < task.step_tokens ? left : task.step_tokens;
      cpu::StepPrefetcher<S> k_ahead = step_ahead(task, begin + jump, k_stream, k_stride, task.head_dim_qk);
      cpu::StepPrefetcher<S> v_ahead = step_ahead(task, begin + jump, v_stream, task.v_token_stride, task.head_dim_v);
      std::int64_t t = 0;
      for (; t + kWidth <= tokens; t += kWidth) {
        score_tokens(q, k_stream + (begin + t) * k_stride, k_stride, task.head_dim_qk, k_ahead, scores + t);
      }
      for (; t < tokens; ++t) scores[t] = score_one_token(q, k_stream + (begin + t) * k_stride, task.head_dim_qk);
      for (; t % kWidth != 0; ++t) scores[t] = -INFINITY;

      Vec step_max = S::load(scores);
      for (std::int64_t at = kWidth; at < tokens; at += kWidth) step_max = S::max(step_max, S::load(scores + at));
      const float largest = first_lane(S::template max_across<1>(step_max));
      const float new_max = largest > max_score ? largest : max_score;
      const float correction = new_max == max_score ? 1.0F : std::exp2(max_score - new_max);  // 0 at first
      sums = S::mul(sums, S::broadcast(correction));
      exponentiate(scores, tokens, new_max, sums);
      max_score = new_max;
      accumulate_step(task, scores, v_stream + begin * task.v_token_stride, tokens, correction, v_ahead);
    }
    float lanes[kWidth];
    S::store(lanes, sums);
    float sum = 0.0F;
    for (const float lane : lanes) sum += lane;
    store_partial(task, max_score, sum);
  }
};

/// The second pass: out = sum of exp(lse_i - lse) o_i.
template <class S>
void merge_parts(const MergeTask& task) {
  float max_lse = -INFINITY;
  for (std::int64_t i = 0; i < task.num_parts; ++i) {
    if (task.lse[i] > max_lse) max_lse = task.lse[i];
  }
  const float shift = shared::merge_shift(max_lse);
  float sum = 0.0F;
  for (std::int64_t d = 0; d < task.head_dim_v; ++d) task.out[d] = 0.0F;
  for (std::int64_t i = 0; i < task.num_parts; ++i) {
    const float weight = std::exp(task.lse[i] - shift);
    const float* const part = task.o + i * task.head_dim_v;
    sum += weight;
    for (std::int64_t d = 0; d < task.head_dim_v; ++d) task.out[d] += weight * part[d];
  }
  const float inverse = sum > 0.0F ? 1.0F / sum : 0.0F;
  for (std::int64_t d = 0; d < task.head_dim_v; ++d) task.out[d] *= inverse;
}

}  // namespace
}  // namespace kvonce::bench
