// Step [4] of attend.hpp: rows x dims accumulators stay in registers for the whole step.
#pragma once

#include <cstdint>

#include "cpu/attend.hpp"

namespace kvonce::cpu {

/// Where a vector has 16 floats a single row of 128 float32 dims adds up a step's values in four parts, a token of each in turn,
/// whatever the strides are, so that no bit depends on them: attend_in_order.hpp says why. Ragged steps go in order.
template <class S>
constexpr bool adds_parts(KvFormat format, std::int64_t dims) {
  return format == KvFormat::f32 && S::width == 16 && dims == kPartsDims;
}
template <class S>
constexpr bool has_parts(std::int64_t num_tokens) {
  return num_tokens % (kParts * S::width) == 0;
}

/// o += p[t][r] * V[t][first .. first + vectors * width) over the step, accumulators in registers throughout. `o_stride` floats lie
/// between two vectors of a row, `width` between two rows.
template <class S, KvFormat format, int rows, int vectors>
void accumulate_block(Row<S, format> v, std::int64_t first, std::int64_t token_stride, std::int64_t num_tokens,
                      const float* p, std::int64_t p_stride, StepPrefetcher<S>& ahead, float* o,
                      std::int64_t o_stride) {
  using Vec = typename S::Vec;
  using E = typename S::template Elements<format>;
  constexpr std::int64_t kBytes = row_bytes(format, vectors * S::width);
  constexpr std::int64_t kBlock = shared::kGgmlBlockValues;
  std::int64_t base = is_affine(format) ? first : 0;
  if constexpr (is_ggml(format)) {
    v += static_cast<std::uint64_t>(first) / kBlock;
    first = vectors * S::width % kBlock == 0 ? 0 : first % kBlock;
  } else {
    if constexpr (!is_affine(format)) v += first;
    first = 0;
  }
  Vec acc[rows][vectors];
  KVONCE_UNROLL
  for (int r = 0; r < rows; ++r) {
    KVONCE_UNROLL
    for (int i = 0; i < vectors; ++i) acc[r][i] = S::load(o + i * o_stride + r * S::width);
  }
  const auto add_token = [&acc, first, base](const Row<S, format>& values, const float* weights) KVONCE_INLINE_ON_ARM {
    Vec value[vectors];
    KVONCE_UNROLL
    for (int i = 0; i + 1 < vectors; i += 2)
      load_pair_at<S, format>(values, base + i * S::width / kBlock * kBlock, i * S::width % kBlock + first, value[i],
                              value[i + 1]);
    if constexpr (vectors % 2 == 1) value[vectors - 1] = E::load(values + (vectors - 1) * S::width);
    if constexpr (S::kHasLanes && rows >= 3) {
      const auto lanes = S::template load_lanes<lane_rows(rows)>(weights);
      KVONCE_UNROLL
      for (int r = 0; r < rows; ++r) {
        KVONCE_UNROLL
        for (int i = 0; i < vectors; ++i) acc[r][i] = S::fmadd_lane(value[i], lanes, r, acc[r][i]);
      }
      return;
    }
    KVONCE_UNROLL
    for (int r = 0; r < rows; ++r) {
      const Vec weight = S::broadcast(weights[r]);
      KVONCE_UNROLL
      for (int i = 0; i < vectors; ++i) acc[r][i] = S::fmadd(value[i], weight, acc[r][i]);
    }
  };
  std::int64_t tokens_left = num_tokens;
  if constexpr (rows == 1 && adds_parts<S>(format, vectors * S::width)) {
    if (has_parts<S>(num_tokens)) {
      const std::int64_t part_rows = num_tokens / kParts;
      for (std::int64_t row = 0; row < part_rows; ++row) {
        for (std::int64_t part = 0; part < kParts; ++part) {
          const std::int64_t token = part * part_rows + row;
          if (ahead.asks_by_part()) {
            ahead.advance_part(v + token * token_stride, kBytes, row);
          } else {
            ahead.advance(kBytes);
          }
          add_token(v + token * token_stride, p + token * p_stride);
        }
      }
      tokens_left = 0;
    }
  }
  // Two tokens per turn: the loop's own instructions compete with the multiply-adds for the same two ports.
  for (; tokens_left >= 2; tokens_left -= 2, v = later_row(v, 2, token_stride), p += 2 * p_stride) {
    add_token(v, p);
    if constexpr (kBytes >= 256) ahead.advance(kBytes);
    ahead.advance(kBytes >= 256 ? kBytes : 2 * kBytes);
    add_token(later_row(v, 1, token_stride), p + p_stride);
  }
  if (tokens_left > 0) add_token(v, p);
  KVONCE_UNROLL
  for (int r = 0; r < rows; ++r) {
    KVONCE_UNROLL
    for (int i = 0; i < vectors; ++i) S::store(o + i * o_stride + r * S::width, acc[r][i]);
  }
}

/// Most vectors of dims per pass whose accumulators, values and weight fit the register file.
template <class S>
constexpr int value_vectors(int rows) {
  const int spare = S::kRegisters - 2;
  int vectors = 8;
  while (vectors > 1 && rows * vectors + vectors > spare) vectors /= 2;
  return vectors;
}

template <class S, KvFormat format, int rows>
void accumulate_values(const void* v_rows, std::int64_t token_stride, std::int64_t num_tokens, const float* p,
                       std::int64_t p_stride, std::int64_t dims, StepPrefetcher<S>& ahead, float* o,
                       std::int64_t o_stride) {
  using E = typename S::template Elements<format>;
  // Blocks come in pairs of vectors, also where eight rows leave registers for one only (neon).
  constexpr int kVectors = is_block(format) && value_vectors<S>(rows) < 2 ? 2 : value_vectors<S>(rows);
  const Row<S, format> v = first_row<S, format>(v_rows);
  std::int64_t dim = 0;
  const auto pass = [&](auto vectors) {
    constexpr int kCount = decltype(vectors)::value;
    for (; dim + kCount * S::width <= dims; dim += kCount * S::width) {
      accumulate_block<S, format, rows, kCount>(v, dim, token_stride, num_tokens, p, p_stride, ahead,
                                                o + dim / S::width * o_stride, o_stride);
    }
  };
  // 8 rows x 3 vectors load fewer weights than 8 x 2 (f16 d128 1.02x, Ice Lake); even and odd dims come in pairs of vectors.
  if constexpr (!is_block(format) && !E::kEvenOdd && kVectors == 2 && 3 * rows + 3 <= S::kRegisters - 2) {
    if (dims != 4 * S::width) pass(Constant<3>{});
  }
  if constexpr (kVectors >= 8) pass(Constant<8>{});
  if constexpr (kVectors >= 4) pass(Constant<4>{});
  if constexpr (kVectors >= 2) pass(Constant<2>{});
  if constexpr (is_block(format))
    return;  // head dims are whole pairs of vectors
  else {
    pass(Constant<1>{});
    if (dim < dims) {
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        const typename S::Vec value = load_tail<S, format>(v + t * token_stride + dim, dims - dim);
        for (int r = 0; r < rows; ++r) {
          float* o_vec = o + dim / S::width * o_stride + r * S::width;
          S::store(o_vec, S::fmadd(value, S::broadcast(p[t * p_stride + r]), S::load(o_vec)));
        }
      }
    }
  }
}

}  // namespace kvonce::cpu
