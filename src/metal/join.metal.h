// From a simdgroup's sums to the chunk's partial: alone, or joined with the other token parts of the threadgroup.
#pragma once

#include "metal/work.metal.h"

namespace kvonce_metal {

/// Running softmax of one row: weights are 2^(score - m).
struct RowSum {
  float m;  // largest score, KV_HIDDEN without a key
  float l;  // sum of the weights
};

KV_FN float inverse_of(RowSum sum) { return sum.l == 0.0f ? 0.0f : 1.0f / sum.l; }

/// Where the partial of a row over chunk `chunk` goes: index in [..., num_chunks].
template <typename T>
KV_FN int64_t partial_index(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const RowPlace& at, int chunk) {
  return at.result * b.params[kNumChunks] + chunk;
}

template <typename T>
KV_FN void put_sum(KV_THREAD const AttendBuffers<T>& b, int64_t at, RowSum sum) {
  b.partial_sums[at * 2] = sum.m;
  b.partial_sums[at * 2 + 1] = sum.l;
}

/// The threadgroup memory of a join.
struct JoinArea {
  KV_THREADGROUP float* sums;  // [token_parts, kRows, 2]: m, l
  KV_THREADGROUP float* o;     // [token_parts, join_rows, kDimV]
};

/// Joins rows [first, first + count) of all token parts and writes their partials; all threads of the threadgroup.
template <typename T, int kDimV, int kRows>
KV_FN void join_token_parts(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w, KV_THREAD const Place& place,
                            JoinArea area, int first, int count, int token_parts) {
  for (int i = place.simdgroup * kLanes + place.lane; i < count * kDimV; i += token_parts * kLanes) {
    const int row = first + i / kDimV;
    const int dim = i % kDimV;
    if (w.row_begin + row >= w.num_rows) break;
    RowSum joined = {KV_HIDDEN, 0.0f};
    for (int part = 0; part < token_parts; part++) {
      joined.m = larger(joined.m, area.sums[(part * kRows + row) * 2]);
    }
    float o = 0.0f;
    for (int part = 0; part < token_parts; part++) {
      const float weight = exp2_fast(area.sums[(part * kRows + row) * 2] - joined.m);
      joined.l = multiply_add(weight, area.sums[(part * kRows + row) * 2 + 1], joined.l);
      o = multiply_add(weight, area.o[(part * count + row - first) * kDimV + dim], o);
    }
    const RowPlace row_place = place_of(b, w, w.row_begin + row);
    const int64_t at = partial_index(b, row_place, place.x);
    b.partial_o[at * kDimV + dim] = o * inverse_of(joined);
    if (dim == 0) put_sum(b, at, joined);
  }
}

/// [5] The tile's partials, normalised. `tile` gives a row's sums (row_sum: every lane must arrive) and a lane's elements of
/// its values (put_values(row, scale, to): to[dim] = scale * value).
template <typename T, int kDimV, int kRows, typename Tile>
KV_FN void store_partial(KV_THREAD Tile& tile, KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w,
                         KV_THREAD const Place& place, KV_THREADGROUP float* shared) {
  const int token_parts = param(b.params, kTokenParts);
  if (token_parts <= 1) {
    KV_UNROLL
    for (int row = 0; row < kRows; row++) {
      const RowSum sum = tile.row_sum(row);
      if (w.row_begin + row < w.num_rows) {
        const RowPlace row_place = place_of(b, w, w.row_begin + row);
        const int64_t at = partial_index(b, row_place, place.x);
        tile.put_values(row, inverse_of(sum), b.partial_o + at * kDimV);
        if (place.lane == 0) put_sum(b, at, sum);
      }
    }
    return;
  }
  const int rows = join_rows(token_parts, kRows, kDimV);
  JoinArea area;
  area.sums = shared;
  area.o = shared + token_parts * kRows * 2;
  KV_UNROLL
  for (int row = 0; row < kRows; row++) {
    const RowSum sum = tile.row_sum(row);
    if (place.lane == 0) {
      area.sums[(place.simdgroup * kRows + row) * 2] = sum.m;
      area.sums[(place.simdgroup * kRows + row) * 2 + 1] = sum.l;
    }
  }
  for (int first = 0; first < kRows; first += rows) {
    const int count = smaller_int(rows, kRows - first);
    if (first > 0) barrier();  // the rows before have been joined
    KV_UNROLL
    for (int row = 0; row < kRows; row++) {
      if (row >= first && row < first + count) {
        tile.put_values(row, 1.0f, area.o + (place.simdgroup * count + row - first) * kDimV);
      }
    }
    barrier();
    join_token_parts<T, kDimV, kRows>(b, w, place, area, first, count, token_parts);
  }
}

}  // namespace kvonce_metal
