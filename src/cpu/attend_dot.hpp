// Steps [2] and [4] on targets that multiply bf16 pairs: half the multiply instructions, no conversion.
// Scores: q and K keep their stored bits, so the products are exact; denormal inputs count as zero. Float32 or f16 q takes
// attend.hpp's path: rounding it to bf16 would cost more accuracy than the output format has.
// Values: weights are rounded to bf16 for the products, not for their sum.
#pragma once

#include <cstdint>

#include "cpu/attend_values.hpp"

namespace kvonce::cpu {

/// The last count < 2 * width values of a row, zero-extended: never reads past the row.
template <class S>
typename S::Pairs load_pairs_tail(const std::uint16_t* p, std::int64_t count) {
  if (count == S::width) return S::load_half_pairs(p);
  std::uint16_t buffer[2 * S::width] = {};
  for (std::int64_t i = 0; i < count; ++i) buffer[i] = p[i];
  return S::load_pairs(buffer);
}

// [1] Packs rows as bf16: values [32 b, 32 b + 32) of row r at block (b * rows + r), zero-extended.
template <class S>
void load_row_tile_dot(const ChunkTask& task, std::int64_t first_row, int rows, float* q) {
  constexpr std::int64_t kBlock = 2 * S::width;
  for (int r = 0; r < rows; ++r) {
    const auto* p = static_cast<const std::uint16_t*>(task.q) + q_offset(task, first_row + r);
    for (std::int64_t dim = 0; dim < task.head_dim_qk; dim += kBlock) {
      auto* block = reinterpret_cast<std::uint16_t*>(q + (dim / kBlock * rows + r) * S::width);
      for (std::int64_t i = 0; i < kBlock; ++i) block[i] = dim + i < task.head_dim_qk ? p[dim + i] : std::uint16_t{0};
    }
  }
}

// [2] As score_tokens of attend.hpp.
template <class S, int rows>
void score_tokens_dot(const void* k_rows, std::int64_t token_stride, std::int64_t num_tokens, const float* q,
                      std::int64_t dims, float scale_log2e, StepPrefetcher<S>& ahead, float* scores) {
  using Vec = typename S::Vec;
  using Pairs = typename S::Pairs;
  constexpr int kLaneRows = lane_rows(rows);
  constexpr int kTokens = S::width / kLaneRows;
  constexpr int kTurn = kTokens < 4 ? kTokens : 4;
  constexpr std::int64_t kBlock = 2 * S::width;
  constexpr std::int64_t kBlockBytes = kBlock * std::int64_t{sizeof(std::uint16_t)};
  const auto* k = static_cast<const std::uint16_t*>(k_rows);

  for (std::int64_t token = 0; token < num_tokens; token += kTokens) {
    const std::uint16_t* row[kTokens];
    find_rows(k, token_stride, token, num_tokens, row);
    Vec acc[S::width];
    KVONCE_UNROLL
    for (int i = 0; i < S::width; ++i) acc[i] = S::zero();
    const auto* q_block = reinterpret_cast<const std::uint16_t*>(q);
    std::int64_t dim = 0;
    for (; dim + kBlock <= dims; dim += kBlock, q_block += rows * kBlock) {
      if constexpr (rows <= kTokens) {  // few rows: q stays in registers, K passes through
        Pairs query[rows];
        KVONCE_UNROLL
        for (int r = 0; r < rows; ++r) {
          query[r] = S::load_pairs(q_block + r * kBlock);
          S::pin(query[r]);
        }
        KVONCE_UNROLL
        for (int j = 0; j < kTokens; ++j) {
          const Pairs key = S::load_pairs(row[j] + dim);
          if (j % kTurn == kTurn - 1) ahead.advance(kTurn * kBlockBytes);
          KVONCE_UNROLL
          for (int r = 0; r < rows; ++r) acc[j * kLaneRows + r] = S::dot_pairs(acc[j * kLaneRows + r], key, query[r]);
        }
      } else {
        Pairs key[kTokens];
        KVONCE_UNROLL
        for (int j = 0; j < kTokens; ++j) key[j] = S::load_pairs(row[j] + dim);
        ahead.advance(kTokens * kBlockBytes);
        KVONCE_UNROLL
        for (int r = 0; r < rows; ++r) {
          Pairs query = S::load_pairs(q_block + r * kBlock);
          S::pin(query);
          KVONCE_UNROLL
          for (int j = 0; j < kTokens; ++j)
            acc[j * kLaneRows + r] = S::dot_pairs(acc[j * kLaneRows + r], key[j], query);
        }
      }
    }
    if (dim < dims) {
      KVONCE_UNROLL
      for (int j = 0; j < kTokens; ++j) {
        const Pairs key = load_pairs_tail<S>(row[j] + dim, dims - dim);
        KVONCE_UNROLL
        for (int r = 0; r < rows; ++r) {
          acc[j * kLaneRows + r] = S::dot_pairs(acc[j * kLaneRows + r], key, S::load_pairs(q_block + r * kBlock));
        }
      }
    }
    S::store(scores + token * kLaneRows, S::mul(S::sum_lanes(acc), S::broadcast(scale_log2e)));
  }
  hide_padding(scores, num_tokens * kLaneRows, S::width);
}

// [4] ------------------------------------------------------------------------------------------------------------------

/// o += p[t][r] * V[t][first .. first + vectors * width), two tokens per product; pairs as S::round_weights leaves them.
template <class S, int rows, int vectors>
void accumulate_block_dot(const std::uint16_t* v, std::int64_t token_stride, std::int64_t num_tokens,
                          const std::uint32_t* pairs, StepPrefetcher<S>& ahead, float* o, std::int64_t o_stride) {
  using Vec = typename S::Vec;
  using Pairs = typename S::Pairs;
  constexpr std::int64_t kBytes = row_bytes(KvFormat::bf16, vectors * S::width);
  Vec acc[rows][vectors];
  KVONCE_UNROLL
  for (int r = 0; r < rows; ++r) {
    KVONCE_UNROLL
    for (int i = 0; i < vectors; ++i) acc[r][i] = S::load(o + i * o_stride + r * S::width);
  }
  const auto add_tokens = [&acc](const std::uint16_t* first, const std::uint16_t* second,
                                 const std::uint32_t* weights) KVONCE_INLINE_ON_ARM {
    Pairs value[vectors];
    if constexpr (vectors == 1) {  // eight rows of dims in order (neon): registers for half a pair
      Pairs none;
      S::pair_tokens(S::load_half_pairs(first), second != nullptr ? S::load_half_pairs(second) : S::no_pairs(),
                     value[0], none);
    } else {
      KVONCE_UNROLL
      for (int i = 0; i < vectors; i += 2) {
        const Pairs partner = second != nullptr ? S::load_pairs(second + i * S::width) : S::no_pairs();
        S::pair_tokens(S::load_pairs(first + i * S::width), partner, value[i], value[i + 1]);
      }
    }
    KVONCE_UNROLL
    for (int r = 0; r < rows; ++r) {
      const Pairs weight = S::broadcast_pair(weights[r]);
      KVONCE_UNROLL
      for (int i = 0; i < vectors; ++i) acc[r][i] = S::dot_pairs(acc[r][i], value[i], weight);
    }
  };
  for (; num_tokens >= 2; num_tokens -= 2, v += 2 * token_stride, pairs += lane_rows(rows)) {
    add_tokens(v, v + token_stride, pairs);
    ahead.advance(2 * kBytes);
  }
  if (num_tokens > 0) add_tokens(v, nullptr, pairs);
  KVONCE_UNROLL
  for (int r = 0; r < rows; ++r) {
    KVONCE_UNROLL
    for (int i = 0; i < vectors; ++i) S::store(o + i * o_stride + r * S::width, acc[r][i]);
  }
}

/// As accumulate_values of attend_values.hpp.
template <class S, int rows>
void accumulate_values_dot(const void* v_rows, std::int64_t token_stride, std::int64_t num_tokens, const float* p,
                           std::int64_t p_stride, std::int64_t dims, StepPrefetcher<S>& ahead, float* o,
                           std::int64_t o_stride) {
  constexpr std::int64_t kTokens = 128;  // weights of so many tokens are rounded at a time
  constexpr int kVectors = value_vectors<S>(rows);
  alignas(64) std::uint32_t pairs[kTokens / 2 * lane_rows(rows)];
  const auto* v = static_cast<const std::uint16_t*>(v_rows);
  const std::int64_t whole = dims / (2 * S::width) * 2 * S::width;
  for (std::int64_t token = 0; token < num_tokens; token += kTokens) {
    const std::int64_t count = num_tokens - token < kTokens ? num_tokens - token : kTokens;
    S::template round_weights<lane_rows(rows)>(p + token * p_stride, p_stride, count, pairs);
    const std::uint16_t* rows_at = v + token * token_stride;
    std::int64_t dim = 0;
    const auto pass = [&](auto vectors) {
      constexpr int kCount = decltype(vectors)::value;
      for (; dim + kCount * S::width <= whole; dim += kCount * S::width) {
        accumulate_block_dot<S, rows, kCount>(rows_at + dim, token_stride, count, pairs, ahead,
                                              o + dim / S::width * o_stride, o_stride);
      }
    };
    if constexpr (kVectors >= 8) pass(Constant<8>{});
    if constexpr (kVectors >= 4) pass(Constant<4>{});
    pass(Constant < kVectors == 1 ? 1 : 2 > {});
  }
  // What is less than a pair of vectors.
  if (whole < dims) {
    accumulate_values<S, KvFormat::bf16, rows>(v + whole, token_stride, num_tokens, p, p_stride, dims - whole, ahead,
                                               o + whole / S::width * o_stride, o_stride);
  }
}

}  // namespace kvonce::cpu
