// How a row of K, V or q becomes float32 vectors: whole vectors and pairs of them, the rest of a row, blocks of quantised values.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/unroll.hpp"
#include "kvonce/types.hpp"
#include "shared/ggml_blocks.h"

namespace kvonce::cpu {

static constexpr bool is_ggml(KvFormat format) { return format == KvFormat::q8_0 || format == KvFormat::q4_0; }
static constexpr bool is_affine(KvFormat format) {
  return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4;
}
/// Whether values come in whole blocks of 32: rows are whole pairs of vectors then.
static constexpr bool is_block(KvFormat format) { return is_ggml(format) || is_affine(format); }

/// Bytes of what a task's strides count: a value, a GGML block or a byte of MLX's codes.
static constexpr std::int64_t bytes_of(KvFormat format) {
  if (format == KvFormat::q8_0) return sizeof(shared::Q8Block);
  if (format == KvFormat::q4_0) return sizeof(shared::Q4Block);
  if (is_affine(format)) return 1;
  return format == KvFormat::f32 ? 4 : 2;
}

/// Bytes of `values` values of a format, whole blocks or an even share of one; codes without their scales and biases.
static constexpr std::int64_t row_bytes(KvFormat format, std::int64_t values) {
  if (format == KvFormat::mlx_int4) return values / 2;
  return is_ggml(format) ? values * bytes_of(format) / shared::kGgmlBlockValues : values * bytes_of(format);
}

/// A row of MLX codes, with its groups' scales and biases in float32 (AffineStep).
struct AffineRow {
  const std::uint8_t* codes;
  const float* scales;  // [num_groups]
  const float* biases;  // [num_groups]
  std::int64_t num_groups;
  int group_log2;  // of the values in a group
};

/// How kernels hold a row of K or V.
template <class S, KvFormat format>
using Row = std::conditional_t<is_affine(format), AffineRow, const typename S::template Elements<format>::Stored*>;

/// The first of the rows that a kernel is given: their memory, or an AffineRow.
template <class S, KvFormat format>
Row<S, format> first_row(const void* rows) {
  if constexpr (is_affine(format)) {
    return *static_cast<const AffineRow*>(rows);
  } else {
    return static_cast<Row<S, format>>(rows);
  }
}

/// The row `tokens` further on.
template <class Stored>
KVONCE_INLINE inline const Stored* later_row(const Stored* row, std::int64_t tokens, std::int64_t token_stride) {
  return row + tokens * token_stride;
}
KVONCE_INLINE inline AffineRow later_row(const AffineRow& row, std::int64_t tokens, std::int64_t token_stride) {
  return {row.codes + tokens * token_stride, row.scales + tokens * row.num_groups, row.biases + tokens * row.num_groups,
          row.num_groups, row.group_log2};
}

/// Dims that a loop over pairs of vectors takes at a time: a pair, or a whole block, whose scale is then read once.
template <class S>
constexpr std::int64_t dims_per_turn(KvFormat format) {
  return is_block(format) && 2 * S::width < shared::kGgmlBlockValues ? shared::kGgmlBlockValues : 2 * S::width;
}

/// Values [dim + first, dim + first + 2 * width) of a row; of block formats dim is a multiple of 32, or of a pair where first is 0,
/// and both lie in one block. A block is dequantised here, in registers, once for every row of the tile.
template <class S, KvFormat format>
KVONCE_INLINE inline void load_pair_at(const Row<S, format>& row, std::int64_t dim, std::int64_t first,
                                       typename S::Vec& a, typename S::Vec& b) {
  using E = typename S::template Elements<format>;
  if constexpr (is_affine(format)) {
    const std::int64_t group = dim >> row.group_log2;  // of the whole block: its pairs share what they load
    E::load_pair(row.codes + row_bytes(format, dim + first), row.scales[group], row.biases[group], a, b);
  } else if constexpr (is_ggml(format)) {
    E::load_pair(row + static_cast<std::uint64_t>(dim) / shared::kGgmlBlockValues, static_cast<int>(first), a, b);
  } else {
    E::load_pair(row + dim + first, a, b);
  }
}

/// Values [dim, dim + 32) of two rows of a block format, a quarter of each per vector.
template <class S, KvFormat format>
KVONCE_INLINE inline void load_split_at(const Row<S, format>& row_0, const Row<S, format>& row_1, std::int64_t dim,
                                        typename S::Vec (&quarter)[4]) {
  using E = typename S::template Elements<format>;
  if constexpr (is_affine(format)) {
    const std::int64_t group = dim >> row_0.group_log2;
    E::load_split(row_0.codes + row_bytes(format, dim), row_1.codes + row_bytes(format, dim), row_0.scales + group,
                  row_1.scales + group, row_0.biases + group, row_1.biases + group, quarter);
  } else {
    const std::uint64_t block = static_cast<std::uint64_t>(dim) / shared::kGgmlBlockValues;
    E::load_split(row_0 + block, row_1 + block, quarter[0], quarter[1], quarter[2], quarter[3]);
  }
}

/// The last num_dims % width values of a row, zero-extended: never reads past the row.
template <class S, KvFormat format>
typename S::Vec load_tail(const typename S::template Elements<format>::Stored* p, std::int64_t count) {
  typename S::template Elements<format>::Stored buffer[S::width] = {};
  for (std::int64_t i = 0; i < count; ++i) buffer[i] = p[i];
  return S::template Elements<format>::load(buffer);
}

/// The next `width` values of a row of which `count` are left.
template <class S, KvFormat format>
typename S::Vec load_upto(const typename S::template Elements<format>::Stored* p, std::int64_t count) {
  return count >= S::width ? S::template Elements<format>::load(p) : load_tail<S, format>(p, count);
}

}  // namespace kvonce::cpu
