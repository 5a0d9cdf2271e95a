// Step [2] for a tile of one row where prefetch_level is 2: K row by row instead of `width` rows side by side, which is the order
// that hardware prefetchers follow. Without a request of its own it is then faster than with any (plan.cpp has the figures).
// The bits are score_tokens'.
//
// In parts: one stream waits for one page's translation at a time; four, a quarter of the step each, wait for four at once
// (Zen 4, pages of 4 KB, one thread: four streams read 26.0 GB/s, one 20.4; with pages of 2 MB 29.5
// and 29.4). Requests 2 KB ahead keep them going where the values follow the keys.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/attend_values.hpp"

namespace kvonce::cpu {

/// q . row, a sum per lane.
template <class S, KvFormat format>
KVONCE_INLINE inline typename S::Vec multiply_row(const Row<S, format>& row, const float* q, std::int64_t dims) {
  using Vec = typename S::Vec;
  constexpr std::int64_t kPair = 2 * S::width;
  Vec sum = S::zero();
  std::int64_t dim = 0;
  const auto add_pairs = [&](auto count) KVONCE_INLINE_ON_ARM {
    constexpr std::int64_t kDims = decltype(count)::value;
    for (; dim + kDims <= dims; dim += kDims, q += kDims) {
      KVONCE_UNROLL
      for (std::int64_t pair = 0; pair < kDims; pair += kPair) {
        Vec a;
        Vec b;
        load_pair_at<S, format>(row, dim, pair, a, b);
        sum = S::fmadd(b, S::load(q + pair + S::width), S::fmadd(a, S::load(q + pair), sum));
      }
    }
  };
  // Four pairs a turn where vectors are short: AVX2, L2-resident, bf16 d64 9.8 to 8.9 ns per token, d128 16.8 to 15.3, f16 level.
  if constexpr (kPair <= 16 && !is_block(format)) add_pairs(Constant<std::int64_t{64}>{});
  add_pairs(Constant<dims_per_turn<S>(format)>{});
  if constexpr (!is_block(format)) {
    for (; dim < dims; dim += S::width, q += S::width) {
      sum = S::fmadd(load_upto<S, format>(row + dim, dims - dim), S::load(q), sum);
    }
  }
  return sum;
}

// [2] As score_tokens of attend.hpp.
template <class S, KvFormat format>
void score_tokens_in_order(const void* k_rows, std::int64_t token_stride, std::int64_t num_tokens, const float* q,
                           std::int64_t dims, float scale_log2e, StepPrefetcher<S>& ahead, float* scores) {
  using Vec = typename S::Vec;
  const std::int64_t bytes = row_bytes(format, dims);
  const Vec scale = S::broadcast(scale_log2e);
  Vec acc[S::width];
  if constexpr (adds_parts<S>(format, kPartsDims)) {
    if (ahead.asks_by_part()) {
      constexpr std::int64_t kRows = S::width / kParts;  // of each part, a vector of scores
      const std::int64_t part_rows = num_tokens / kParts;
      const float* const k = first_row<S, format>(k_rows);
      for (std::int64_t row = 0; row < part_rows; row += kRows) {
        for (std::int64_t i = 0; i < kRows; ++i) {
          for (std::int64_t part = 0; part < kParts; ++part) {
            const float* const key = k + (part * part_rows + row + i) * token_stride;
            ahead.advance_part(key, row_bytes(format, kPartsDims), row + i);
            acc[part * kRows + i] = multiply_row<S, format>(key, q, kPartsDims);
          }
        }
        float sums[S::width];
        S::store(sums, S::mul(S::sum_lanes(acc), scale));
        for (std::int64_t part = 0; part < kParts; ++part) {
          std::memcpy(scores + part * part_rows + row, sums + part * kRows, kRows * sizeof(float));
        }
      }
      return;
    }
  }
  for (std::int64_t token = 0; token < num_tokens; token += S::width) {
    Row<S, format> row[S::width];
    find_rows(first_row<S, format>(k_rows), token_stride, token, num_tokens, row);
    for (int j = 0; j < S::width; ++j) {
      acc[j] = multiply_row<S, format>(row[j], q, dims);
      ahead.advance(bytes);
    }
    S::store(scores + token, S::mul(S::sum_lanes(acc), scale));
  }
  hide_padding(scores, num_tokens, S::width);
}

}  // namespace kvonce::cpu
