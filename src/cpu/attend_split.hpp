// Steps [1] and [2] for tiles of more than four rows on targets whose vectors have halves: a K vector holds half as many
// dims of two tokens, so a row's accumulator collects two scores and the reduction costs half as much per score (bf16,
// group 8, AVX-512: 8 + 22 instead of 46 instructions beside 128 multiply-adds at d128, 4 + 22 beside 64 at d64).
#pragma once

#include <cstdint>

#include "cpu/attend.hpp"

namespace kvonce::cpu {

// [1] Packs rows by halves of a vector: dims [h width / 2, (h + 1) width / 2) of row r at (h * rows + r) * n, n = width / 2, or
//     n = width with the half there twice, where a plain load is faster than one that repeats it. Where K loads as even
//     and odd dims, a pair of halves holds the even and the odd dims of `width` neighbours.
template <class S, KvFormat format, bool twice>
void load_row_tile_split(const ChunkTask& task, std::int64_t first_row, int rows, float* q) {
  constexpr bool kEvenOdd = S::template Elements<format>::kEvenOdd;
  constexpr int kHalf = S::width / 2;
  constexpr int kStored = twice ? S::width : kHalf;
  for (int r = 0; r < rows; ++r, q += kStored) {
    const std::int64_t offset = q_offset(task, first_row + r);
    with_dtype(task.q_dtype, [&](auto q_format) {
      using Stored = typename S::template Elements<decltype(q_format)::value>::Stored;
      const auto* p = static_cast<const Stored*>(task.q) + offset;
      float* halves = q;
      for (std::int64_t dim = 0; dim < task.head_dim_qk; dim += S::width, halves += 2 * rows * kStored) {
        const typename S::Vec values = load_upto<S, decltype(q_format)::value>(p + dim, task.head_dim_qk - dim);
        for (int at = 0; at < kStored; at += kHalf) {
          S::template store_halves<kEvenOdd>(halves + at, halves + rows * kStored + at, values);
        }
      }
    });
  }
}

// [2] As score_tokens of attend.hpp.
template <class S, KvFormat format, int rows, bool twice>
void score_tokens_split(const void* k_rows, std::int64_t token_stride, std::int64_t num_tokens, const float* q,
                        std::int64_t dims, float scale_log2e, StepPrefetcher<S>& ahead, float* scores) {
  using Vec = typename S::Vec;
  using E = typename S::template Elements<format>;
  using Stored = typename E::Stored;
  constexpr int kLaneRows = lane_rows(rows);
  constexpr int kPairs = S::width / kLaneRows;  // of tokens
  constexpr int kTokens = 2 * kPairs;
  constexpr int kStored = twice ? S::width : S::width / 2;  // of q
  const Row<S, format> k = first_row<S, format>(k_rows);
  const std::int64_t half_bytes = kPairs * row_bytes(format, dims);  // of the block's rows

  for (std::int64_t token = 0; token < num_tokens; token += kTokens) {
    Row<S, format> row[kTokens];
    find_rows(k, token_stride, token, num_tokens, row);
    ahead.advance(half_bytes);
    Vec acc[kPairs][kLaneRows];
    KVONCE_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      KVONCE_UNROLL
      for (int r = 0; r < kLaneRows; ++r) acc[j][r] = S::zero();
    }
    const float* q_half = q;
    const auto add_dims = [&acc, &q_half](const Vec(&key)[kPairs]) {
      KVONCE_UNROLL
      for (int r = 0; r < rows; ++r) {
        Vec query = twice ? S::load(q_half + r * kStored) : S::load_twice(q_half + r * kStored);
        S::pin(query);
        KVONCE_UNROLL
        for (int j = 0; j < kPairs; ++j) acc[j][r] = S::fmadd(key[j], query, acc[j][r]);
      }
      q_half += rows * kStored;
    };
    if constexpr (is_block(format)) {
      for (std::int64_t dim = 0; dim < dims; dim += shared::kGgmlBlockValues) {
        Vec key[4][kPairs];
        KVONCE_UNROLL
        for (int j = 0; j < kPairs; ++j) {
          Vec quarter[4];
          load_split_at<S, format>(row[2 * j], row[2 * j + 1], dim, quarter);
          KVONCE_UNROLL
          for (int i = 0; i < 4; ++i) key[i][j] = quarter[i];
        }
        KVONCE_UNROLL
        for (int i = 0; i < 4; ++i) add_dims(key[i]);
      }
    } else {
      Vec key_a[kPairs];
      Vec key_b[kPairs];
      std::int64_t dim = 0;
      for (; dim + S::width <= dims; dim += S::width) {
        KVONCE_UNROLL
        for (int j = 0; j < kPairs; ++j) E::load_split(row[2 * j] + dim, row[2 * j + 1] + dim, key_a[j], key_b[j]);
        add_dims(key_a);
        add_dims(key_b);
      }
      if (dim < dims) {
        for (int j = 0; j < kPairs; ++j) {
          Stored tail[2][S::width] = {};
          for (std::int64_t i = 0; i < dims - dim; ++i) {
            tail[0][i] = row[2 * j][dim + i];
            tail[1][i] = row[2 * j + 1][dim + i];
          }
          E::load_split(tail[0], tail[1], key_a[j], key_b[j]);
        }
        add_dims(key_a);
        add_dims(key_b);
      }
    }
    ahead.advance(half_bytes);
    KVONCE_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      S::store_half_sums(scores + (token + 2 * j) * kLaneRows, acc[j], scale_log2e);
    }
  }
  hide_padding(scores, num_tokens * kLaneRows, 2 * S::width);
}

}  // namespace kvonce::cpu
