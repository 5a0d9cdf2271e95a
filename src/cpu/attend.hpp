// What    Decode attention of up to rows_per_worker query rows over one token chunk of one KV stream, written once over a
//         target's Simd verbs and compiled once per target.
// Shapes  q [num_rows][head_dim_qk], K [tokens][head_dim_qk], V [tokens][head_dim_v]; result: one partial per row.
// Work    rows | tile 0 (row_tile rows) | tile 1 | ...      every tile runs inside each token step, so the step's K and V
//         keys | step 0 (step_tokens)   | step 1 | ...      come from memory once and from the L1 cache for later tiles
// Steps   [1] load_row_tile      q to float32, packed so that a step reads it in order
//         [2] score_tokens       rows x tokens accumulators, one transposing reduction per vector of pairs, then scale *
//                                log2(e): scores are base 2
//         [3] update_softmax     running maximum, exponentials, running sum; o is rescaled only when a maximum grew
//         [4] accumulate_values  rows x dims accumulators stay in registers for the whole step (attend_values.hpp)
//         [5] store_partial      o / sum and the natural-log lse
// Bytes   (head_dim_qk * K element + head_dim_v * V element) * tokens, once per call whatever num_rows is
// Layout  scores of a tile: [token][lane_rows], lane_rows = rows rounded up to a power of two, so a vector holds
//         width / lane_rows tokens. q and o of a tile: [vector of dims][row][width], dims in the K or V format's own lane
//         order (Elements::kEvenOdd) until store_partial.
// Masks   causal, window and kv_start give each row one token range, a mask may hide any key of it (bias.hpp). A step that
//         every row of a tile sees whole runs the tile kernels; of other steps the hidden scores become -inf, and tokens
//         that only some rows see add their values row by row, so that a hidden key's V is never multiplied, not even by zero.
// Not handled here: tails of a chunk beyond the visible range (run.cpp clips), merging (merge.hpp).
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cpu/load.hpp"
#include "cpu/simd/prefetch.hpp"
#include "cpu/simd/unroll.hpp"
#include "cpu/task.hpp"
#include "shared/numeric.h"
#include "shared/partial.h"
#include "shared/token_range.h"

namespace kvonce::cpu {

/// Elements from the task's q to the stream's row.
static inline std::int64_t q_offset(const ChunkTask& task, std::int64_t row) {
  return row / task.group_size * task.q_token_stride + row % task.group_size * task.q_head_stride;
}

template <auto constant>
struct Constant {
  static constexpr auto value = constant;
};

/// Calls function with the dtype's Constant<KvFormat>.
template <class Function>
void with_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::f32:
      function(Constant<KvFormat::f32>{});
      break;
    case DType::f16:
      function(Constant<KvFormat::f16>{});
      break;
    case DType::bf16:
      function(Constant<KvFormat::bf16>{});
      break;
  }
}

// [1] ------------------------------------------------------------------------------------------------------------------

/// One vector pair of q in the lane order of K format `format`.
template <class S, KvFormat format, KvFormat q_format>
void load_q_pair(const typename S::template Elements<q_format>::Stored* p, typename S::Vec& a, typename S::Vec& b) {
  using Q = typename S::template Elements<q_format>;
  if constexpr (Q::kEvenOdd == S::template Elements<format>::kEvenOdd) {
    Q::load_pair(p, a, b);
  } else if constexpr (Q::kEvenOdd) {
    a = Q::load(p);
    b = Q::load(p + S::width);
  } else {
    float in_order[2 * S::width];
    float even_odd[2 * S::width];
    S::store(in_order, Q::load(p));
    S::store(in_order + S::width, Q::load(p + S::width));
    for (int i = 0; i < S::width; ++i) {
      even_odd[i] = in_order[2 * i];
      even_odd[S::width + i] = in_order[2 * i + 1];
    }
    a = S::load(even_odd);
    b = S::load(even_odd + S::width);
  }
}

template <class S, KvFormat format, KvFormat q_format>
void load_row(const typename S::template Elements<q_format>::Stored* p, std::int64_t dims, int rows, float* q) {
  constexpr std::int64_t kPair = 2 * S::width;
  std::int64_t dim = 0;
  for (; dim + kPair <= dims; dim += kPair, q += 2 * rows * S::width) {
    typename S::Vec a;
    typename S::Vec b;
    load_q_pair<S, format, q_format>(p + dim, a, b);
    S::store(q, a);
    S::store(q + rows * S::width, b);
  }
  for (; dim < dims; dim += S::width, q += rows * S::width) {
    S::store(q, load_upto<S, q_format>(p + dim, dims - dim));
  }
}

/// Packs rows [first_row, first_row + rows): vector v of row r at q + (v * rows + r) * width.
template <class S, KvFormat format>
void load_row_tile(const ChunkTask& task, std::int64_t first_row, int rows, float* q) {
  for (int r = 0; r < rows; ++r, q += S::width) {
    const std::int64_t offset = q_offset(task, first_row + r);
    with_dtype(task.q_dtype, [&](auto q_format) {
      using Stored = typename S::template Elements<decltype(q_format)::value>::Stored;
      load_row<S, format, decltype(q_format)::value>(static_cast<const Stored*>(task.q) + offset, task.head_dim_qk,
                                                     rows, q);
    });
  }
}

// [2] ------------------------------------------------------------------------------------------------------------------

/// K rows of tokens [token, token + count); past the last token its row again.
template <class R, int count>
KVONCE_INLINE inline void find_rows(const R& k, std::int64_t token_stride, std::int64_t token, std::int64_t num_tokens,
                                    R (&row)[count]) {
  if (token + count <= num_tokens) {
    row[0] = later_row(k, token, token_stride);
    for (int j = 1; j < count; ++j) row[j] = later_row(row[j - 1], 1, token_stride);
    return;
  }
  for (int j = 0; j < count; ++j) {
    row[j] = later_row(k, token + j < num_tokens ? token + j : num_tokens - 1, token_stride);
  }
}

/// Base-2 scores of `rows` rows against num_tokens >= 1 tokens. Writes whole vectors; lanes past num_tokens become -inf.
/// Tells `ahead` how many bytes of K it has read.
template <class S, KvFormat format, int rows>
void score_tokens(const void* k_rows, std::int64_t token_stride, std::int64_t num_tokens, const float* q,
                  std::int64_t dims, float scale_log2e, StepPrefetcher<S>& ahead, float* scores) {
  using Vec = typename S::Vec;
  constexpr int kLaneRows = lane_rows(rows);
  constexpr int kTokens = S::width / kLaneRows;
  constexpr int kTurn = kTokens < 4 ? kTokens : 4;
  constexpr std::int64_t kPair = 2 * S::width;
  constexpr std::int64_t kPairBytes = row_bytes(format, kPair);
  constexpr std::int64_t kStride = dims_per_turn<S>(format);
  const Row<S, format> k = first_row<S, format>(k_rows);

  for (std::int64_t token = 0; token < num_tokens; token += kTokens) {
    Row<S, format> row[kTokens];
    find_rows(k, token_stride, token, num_tokens, row);
    // acc[j * kLaneRows + r]; rows that only pad the power of two stay zero.
    Vec acc[S::width];
    KVONCE_UNROLL
    for (int i = 0; i < S::width; ++i) acc[i] = S::zero();

    const float* q_vec = q;
    std::int64_t dim = 0;
    for (; dim + kStride <= dims; dim += kStride, q_vec += kStride * rows) {
      KVONCE_UNROLL
      for (std::int64_t pair = 0; pair < kStride; pair += kPair) {
        const float* q_pair = q_vec + pair * rows;
        if constexpr (rows <= kTokens) {  // few rows: q stays in registers, K passes through
          Vec q_a[rows];
          Vec q_b[rows];
          KVONCE_UNROLL
          for (int r = 0; r < rows; ++r) {
            q_a[r] = S::load(q_pair + r * S::width);
            q_b[r] = S::load(q_pair + (rows + r) * S::width);
            S::pin(q_a[r]);
            S::pin(q_b[r]);
          }
          KVONCE_UNROLL
          for (int j = 0; j < kTokens; ++j) {
            Vec a;
            Vec b;
            load_pair_at<S, format>(row[j], dim, pair, a, b);
            if (j % kTurn == kTurn - 1) ahead.advance(kTurn * kPairBytes);
            KVONCE_UNROLL
            for (int r = 0; r < rows; ++r) {
              acc[j * kLaneRows + r] = S::fmadd(b, q_b[r], S::fmadd(a, q_a[r], acc[j * kLaneRows + r]));
            }
          }
        } else {  // many rows: a pair of K vectors per token stays in registers, q passes through
          Vec k_a[kTokens];
          Vec k_b[kTokens];
          KVONCE_UNROLL
          for (int j = 0; j < kTokens; ++j) load_pair_at<S, format>(row[j], dim, pair, k_a[j], k_b[j]);
          ahead.advance(kTokens * kPairBytes);
          KVONCE_UNROLL
          for (int r = 0; r < rows; ++r) {
            Vec q_a = S::load(q_pair + r * S::width);
            S::pin(q_a);
            KVONCE_UNROLL
            for (int j = 0; j < kTokens; ++j) {
              acc[j * kLaneRows + r] = S::fmadd(k_a[j], q_a, acc[j * kLaneRows + r]);
            }
          }
          KVONCE_UNROLL
          for (int r = 0; r < rows; ++r) {
            Vec q_b = S::load(q_pair + (rows + r) * S::width);
            S::pin(q_b);
            KVONCE_UNROLL
            for (int j = 0; j < kTokens; ++j) {
              acc[j * kLaneRows + r] = S::fmadd(k_b[j], q_b, acc[j * kLaneRows + r]);
            }
          }
        }
      }
    }
    if constexpr (!is_block(format)) {
      for (; dim < dims; dim += S::width, q_vec += rows * S::width) {  // at most one whole vector and one tail
        KVONCE_UNROLL
        for (int j = 0; j < kTokens; ++j) {
          const Vec key = load_upto<S, format>(row[j] + dim, dims - dim);
          KVONCE_UNROLL
          for (int r = 0; r < rows; ++r) {
            acc[j * kLaneRows + r] = S::fmadd(key, S::load(q_vec + r * S::width), acc[j * kLaneRows + r]);
          }
        }
      }
    }
    S::store(scores + token * kLaneRows, S::mul(S::sum_lanes(acc), S::broadcast(scale_log2e)));
  }
  hide_padding(scores, num_tokens * kLaneRows, S::width);
}

// [3] ------------------------------------------------------------------------------------------------------------------

/// Turns scores into exp2(score - maximum). `maximum` and `sum` are one vector each, lane l belongs to row l % lane_rows;
/// every lane of a row holds its maximum, its lanes of `sum` still have to be added up.
template <class S, int rows>
void update_softmax(float* scores, std::int64_t num_tokens, float* maximum, float* sum, float* o,
                    std::int64_t o_row_floats) {
  using Vec = typename S::Vec;
  constexpr int kLaneRows = lane_rows(rows);
  const std::int64_t floats = round_up(num_tokens * kLaneRows, S::width);
  Vec step_max = S::load(scores);
  for (std::int64_t i = S::width; i < floats; i += S::width) step_max = S::max(step_max, S::load(scores + i));
  step_max = S::template max_across<kLaneRows>(step_max);

  const Vec old_max = S::load(maximum);
  const Vec new_max = S::max(old_max, step_max);
  // A row without any key so far keeps -inf; a finite shift makes its exponentials 0 rather than NaN.
  const Vec shift = S::max(new_max, S::broadcast(-FLT_MAX));
  Vec total = S::load(sum);
  if (S::any_greater(new_max, old_max)) {
    const Vec factor = S::exp2(S::sub(old_max, shift));
    total = S::mul(total, factor);
    S::store(maximum, new_max);
    float factors[S::width];
    S::store(factors, factor);
    for (std::int64_t i = 0; i < o_row_floats; i += S::width) {
      for (int r = 0; r < rows; ++r, o += S::width) S::store(o, S::mul(S::load(o), S::broadcast(factors[r])));
    }
  }
  for (std::int64_t i = 0; i < floats; i += S::width) {
    const Vec p = S::exp2(S::sub(S::load(scores + i), shift));
    total = S::add(total, p);
    S::store(scores + i, p);
  }
  S::store(sum, total);
}

// [5] ------------------------------------------------------------------------------------------------------------------

/// Normalises one row's o back into dim order and writes its lse. `sum` is the row's total over all lanes.
template <class S, KvFormat format>
void store_partial(const float* o, std::int64_t o_stride, float maximum, float sum, std::int64_t dims, float* partial_o,
                   float* partial_lse) {
  using E = typename S::template Elements<format>;
  constexpr std::int64_t kPair = 2 * S::width;
  const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
  const typename S::Vec factor = S::broadcast(inverse);
  std::int64_t dim = 0;
  for (; dim + kPair <= dims; dim += kPair, o += 2 * o_stride) {
    E::store_pair(partial_o + dim, S::mul(S::load(o), factor), S::mul(S::load(o + o_stride), factor));
  }
  for (; dim < dims; dim += S::width, o += o_stride) S::store(partial_o + dim, S::mul(S::load(o), factor));
  *partial_lse = sum == 0.0F ? -INFINITY : maximum * shared::kLn2 + ::logf(sum);
}

}  // namespace kvonce::cpu
