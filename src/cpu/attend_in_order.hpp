// Step [2] for a tile of one row where prefetch_level is 2: K row by row instead of `width` rows side by side, which is the order
// that hardware prefetchers follow. Without a request of its own it is then faster than with any (plan.cpp has the figures). The bits are score_tokens'.
#pragma once

#include <cstdint>

#include "cpu/attend.hpp"

namespace kvonce::cpu {

// [2] As score_tokens of attend.hpp.
template <class S, KvFormat format>
void score_tokens_in_order(const void* k_rows, std::int64_t token_stride, std::int64_t num_tokens, const float* q,
                           std::int64_t dims, float scale_log2e, StepPrefetcher<S>& ahead, float* scores) {
  using Vec = typename S::Vec;
  constexpr std::int64_t kPair = 2 * S::width;
  constexpr std::int64_t kStride = dims_per_turn<S>(format);
  const std::int64_t bytes = row_bytes(format, dims);

  for (std::int64_t token = 0; token < num_tokens; token += S::width) {
    Row<S, format> row[S::width];
    find_rows(first_row<S, format>(k_rows), token_stride, token, num_tokens, row);
    Vec acc[S::width];
    for (int j = 0; j < S::width; ++j) {
      Vec sum = S::zero();
      const float* q_vec = q;
      std::int64_t dim = 0;
      const auto add_pairs = [&](auto count) KVONCE_INLINE_ON_ARM {
        constexpr std::int64_t kDims = decltype(count)::value;
        for (; dim + kDims <= dims; dim += kDims, q_vec += kDims) {
          KVONCE_UNROLL
          for (std::int64_t pair = 0; pair < kDims; pair += kPair) {
            Vec a;
            Vec b;
            load_pair_at<S, format>(row[j], dim, pair, a, b);
            sum = S::fmadd(b, S::load(q_vec + pair + S::width), S::fmadd(a, S::load(q_vec + pair), sum));
          }
        }
      };
      // Four pairs a turn where vectors are short: AVX2, L2-resident, bf16 d64 9.8 to 8.9 ns per token, d128 16.8 to 15.3, f16 level.
      if constexpr (kPair <= 16 && !is_block(format)) add_pairs(Constant<std::int64_t{64}>{});
      add_pairs(Constant<kStride>{});
      if constexpr (!is_block(format)) {
        for (; dim < dims; dim += S::width, q_vec += S::width) {
          sum = S::fmadd(load_upto<S, format>(row[j] + dim, dims - dim), S::load(q_vec), sum);
        }
      }
      acc[j] = sum;
      ahead.advance(bytes);
    }
    S::store(scores + token, S::mul(S::sum_lanes(acc), S::broadcast(scale_log2e)));
  }
  hide_padding(scores, num_tokens, S::width);
}

}  // namespace kvonce::cpu
