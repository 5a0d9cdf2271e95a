// How a row of K, V or q becomes float32 vectors: whole vectors and pairs of them, the rest of a row, blocks of quantised values.
#pragma once

#include <cstdint>

#include "cpu/simd/unroll.hpp"
#include "kvonce/types.hpp"
#include "shared/ggml_blocks.h"

namespace kvonce::cpu {

static constexpr bool is_block(KvFormat format) { return format == KvFormat::q8_0 || format == KvFormat::q4_0; }

/// Bytes of `values` values of a format, whole blocks or an even share of one.
template <class S, KvFormat format>
constexpr std::int64_t stored_bytes(std::int64_t values) {
  constexpr std::int64_t kBytes = sizeof(typename S::template Elements<format>::Stored);
  return is_block(format) ? values * kBytes / shared::kGgmlBlockValues : values * kBytes;
}

/// Dims that a loop over pairs of vectors takes at a time: a pair, or a whole block, whose scale is then read once.
template <class S>
constexpr std::int64_t dims_per_turn(KvFormat format) {
  return is_block(format) && 2 * S::width < shared::kGgmlBlockValues ? shared::kGgmlBlockValues : 2 * S::width;
}

/// Values [dim + first, dim + first + 2 * width) of a row; of block formats dim is a multiple of 32 and first is below 32. A block
/// is dequantised here, in registers, once for every row of the tile.
template <class S, KvFormat format>
KVONCE_INLINE inline void load_pair_at(const typename S::template Elements<format>::Stored* row, std::int64_t dim,
                                       std::int64_t first, typename S::Vec& a, typename S::Vec& b) {
  using E = typename S::template Elements<format>;
  if constexpr (is_block(format)) {
    E::load_pair(row + static_cast<std::uint64_t>(dim) / shared::kGgmlBlockValues, static_cast<int>(first), a, b);
  } else {
    E::load_pair(row + dim + first, a, b);
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

/// Bytes of what strides count: a value, or a block.
static constexpr std::int64_t bytes_of(KvFormat format) {
  if (format == KvFormat::q8_0) return sizeof(shared::Q8Block);
  if (format == KvFormat::q4_0) return sizeof(shared::Q4Block);
  return format == KvFormat::f32 ? 4 : 2;
}

static constexpr std::int64_t row_bytes(KvFormat format, std::int64_t dims) {
  return (is_block(format) ? dims / shared::kGgmlBlockValues : dims) * bytes_of(format);
}

}  // namespace kvonce::cpu
