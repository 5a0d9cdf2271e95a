// The simdgroup-matrix body: eight rows of a KV stream are the eight rows of 8x8 matrices, eight tokens the columns of the
// scores, and both products run on matrices.
//
// Shapes and work split: as attend.metal.h, with a row tile of 8 and a step of 16 tokens.
//
//     S [8 rows, 8 tokens] += Q [8 rows, 8 dims] K^T [8 dims, 8 tokens]     dqk / 8 products
//     O [8 rows, 8 dims]   += P [8 rows, 8 tokens] V [8 tokens, 8 dims]     dv / 8 products; P is S where it stands
//
//   A lane holds two neighbours of one row of each matrix (matrix_row, matrix_column). Which dims stand where in a product is
//   free as long as both factors agree, so a lane's elements of kGroup products are neighbours in memory.
// Steps: [1] q as stored; [2] scores; [3] one exponential per pair and one per lane and step; [4] values; [5] partials.
// Bytes: as attend.metal.h. Registers: dqk / 8 (16-bit q) + dv / 4 floats and a token's group: 60 at d128.
// Not here: what attend.metal.h does not do either; dims that are no multiple of 16.
#pragma once

#include "metal/join.metal.h"
#include "metal/tokens.metal.h"

namespace kvonce_metal {

KV_FN float2 pair_of(float x, float y) {
  float2 pair;
  pair.x = x;
  pair.y = y;
  return pair;
}

/// The lane that holds columns `column` and column + 1 (column even) of row `row`.
KV_FN int matrix_lane(int row, int column) {
  return (row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column & 2) / 2;
}

template <typename T, int kDimQk, int kDimV>
struct MatrixTile {
  enum : int {
    kRows = 8,
    kTokens = 16,
    kTokenTiles = 2,
    kQkTiles = kDimQk / 8,
    kVTiles = kDimV / 8,
    kQkGroup = kDimQk % 32 == 0 ? 4 : 2,
    kVGroup = kDimV % 32 == 0 ? 4 : 2,
  };
  static_assert(kDimQk % 16 == 0 && kDimV % 16 == 0, "head dims of the matrix body are multiples of 16");

  // Product g * kQkGroup + j: column c of Q and row c of K^T are dim g * 8 * kQkGroup + c * kQkGroup + j.
  T q[kQkTiles][2];
  // Product g * kVGroup + j: columns c and c + 1 (c even) of V and O are dims g * 8 * kVGroup + c * kVGroup + 2 * j and the next.
  float2 o[kVTiles];
  float2 p[kTokenTiles];  // scores, then weights, of the lane's row
  float m;                // of the lane's row, the same in its four lanes
  float l;                // the lane's part of the sum
  RowPlace at;
  TokenRange seen;
  int lane;
  int row;     // matrix_row(lane)
  int column;  // matrix_column(lane)

  /// [1] q of the tile's rows; a row past the last is the last one again.
  KV_FN void load_row_tile(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w) {
    row = matrix_row(lane);
    column = matrix_column(lane);
    at = place_of(b, w, w.row_begin + row);
    seen = visible_tokens(w, at.query);
    if (w.tokens.end < seen.end) seen.end = w.tokens.end;  // the tokens after a part's last are another's
    KV_DEVICE const T* from = q_row(b, w, at);
    KV_UNROLL
    for (int i = 0; i < kQkTiles; i++) {
      const int dim = i / kQkGroup * (8 * kQkGroup) + column * kQkGroup + i % kQkGroup;
      q[i][0] = from[dim * b.q_strides[3]];
      q[i][1] = from[(dim + kQkGroup) * b.q_strides[3]];
    }
    KV_UNROLL
    for (int i = 0; i < kVTiles; i++) o[i] = pair_of(0.0f, 0.0f);
    m = KV_HIDDEN;
    l = 0.0f;
  }

  /// [2] The scores of the lane's row and its tokens.
  template <typename K>
  KV_FN void score_tokens(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w, KV_THREAD const K& k,
                          int token) {
    KV_UNROLL
    for (int i = 0; i < kTokenTiles; i++) {
      const int first = token + 8 * i + column;
      float2 dots = pair_of(0.0f, 0.0f);
      KV_UNROLL
      for (int g = 0; g < kQkTiles / kQkGroup; g++) {
        const int dim = g * (8 * kQkGroup) + row * kQkGroup;
        float x[kQkGroup];
        float y[kQkGroup];
        load_neighbours<kQkGroup>(k, first, dim, first < w.tokens.end, x);
        load_neighbours<kQkGroup>(k, first + 1, dim, first + 1 < w.tokens.end, y);
        KV_UNROLL
        for (int j = 0; j < kQkGroup; j++) {
          const int t = g * kQkGroup + j;
          matrix_multiply_add(dots, pair_of(float(q[t][0]), float(q[t][1])), pair_of(x[j], y[j]));
        }
      }
      p[i].x = score_of(b, w, at, seen, first, dots.x);
      p[i].y = score_of(b, w, at, seen, first + 1, dots.y);
    }
  }

  /// [3] Running maximum, weights, and the earlier values rescaled.
  KV_FN void update_softmax() {
    float high = m;
    KV_UNROLL
    for (int i = 0; i < kTokenTiles; i++) high = larger(high, larger(p[i].x, p[i].y));
    high = larger(high, shuffle_xor(high, 1));
    high = larger(high, shuffle_xor(high, 8));
    const float rescale = exp2_fast(m - high);
    m = high;
    l *= rescale;
    KV_UNROLL
    for (int i = 0; i < kTokenTiles; i++) {
      p[i] = pair_of(weight_of(p[i].x, m), weight_of(p[i].y, m));
      l += p[i].x + p[i].y;
    }
    KV_UNROLL
    for (int i = 0; i < kVTiles; i++) o[i] = pair_of(o[i].x * rescale, o[i].y * rescale);
  }

  /// [4] Adds a step's values.
  template <typename V>
  KV_FN void accumulate_values(KV_THREAD const Work& w, KV_THREAD const V& v, int token) {
    KV_UNROLL
    for (int i = 0; i < kTokenTiles; i++) {
      const int mine = token + 8 * i + row;
      KV_UNROLL
      for (int g = 0; g < kVTiles / kVGroup; g++) {
        float x[2 * kVGroup];
        load_neighbours<2 * kVGroup>(v, mine, g * (8 * kVGroup) + column * kVGroup, mine < w.tokens.end, x);
        if (w.rows_differ && has_special(x)) {
          accumulate_apart(p[i], g, x);
        } else {
          KV_UNROLL
          for (int j = 0; j < kVGroup; j++) {
            matrix_multiply_add(o[g * kVGroup + j], p[i], pair_of(x[2 * j], x[2 * j + 1]));
          }
        }
      }
    }
  }

  /// Whether any lane holds a NaN or an infinity.
  KV_FN bool has_special(KV_THREAD float (&x)[2 * kVGroup]) {
    float special = 0.0f;
    KV_UNROLL
    for (int e = 0; e < 2 * kVGroup; e++) {
      if (!(x[e] <= 3.402823466e38f && x[e] >= -3.402823466e38f)) special = 1.0f;
    }
    return max_lanes(special) != 0.0f;
  }

  /// Row by row, without the values of tokens that the row does not see: 0 times a NaN is one.
  KV_FN void accumulate_apart(float2 weights, int g, KV_THREAD float (&x)[2 * kVGroup]) {
    for (int r = 0; r < kRows; r++) {
      const int owner = matrix_lane(r, row & 6);  // of row r's weight of this lane's token
      const float even = shuffle(weights.x, owner);
      const float odd = shuffle(weights.y, owner);
      const bool has_weight = ((row & 1) != 0 ? odd : even) != 0.0f;
      KV_UNROLL
      for (int j = 0; j < kVGroup; j++) {
        float2 sum = o[g * kVGroup + j];
        matrix_multiply_add(sum, weights, pair_of(has_weight ? x[2 * j] : 0.0f, has_weight ? x[2 * j + 1] : 0.0f));
        if (row == r) o[g * kVGroup + j] = sum;
      }
    }
  }

  template <typename K, typename V>
  KV_FN void take_step(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w, KV_THREAD const K& k,
                       KV_THREAD const V& v, int token) {
    score_tokens(b, w, k, token);
    update_softmax();
    accumulate_values(w, v, token);
  }

  /// Adds up the lanes' parts of l.
  KV_FN void finish_rows() {
    l += shuffle_xor(l, 1);
    l += shuffle_xor(l, 8);
  }
  KV_FN RowSum row_sum(int r) {
    RowSum sum;
    sum.m = shuffle(m, matrix_lane(r, 0));
    sum.l = shuffle(l, matrix_lane(r, 0));
    return sum;
  }
  template <typename Pointer>
  KV_FN void put_values(int r, float scale, Pointer to) {
    if (row != r) return;
    KV_UNROLL
    for (int i = 0; i < kVTiles; i++) {
      const int dim = i / kVGroup * (8 * kVGroup) + column * kVGroup + i % kVGroup * 2;
      to[dim] = scale * o[i].x;
      to[dim + 1] = scale * o[i].y;
    }
  }
};

/// A simdgroup over K and V of any format.
template <int kDimQk, int kDimV, typename T, typename K, typename V>
KV_FN void run_matrix_tile(KV_THREAD const AttendBuffers<T>& b, KV_THREADGROUP float* shared,
                           KV_THREAD const Place& place, KV_THREAD const Work& w, KV_THREAD const K& k,
                           KV_THREAD const V& v) {
  MatrixTile<T, kDimQk, kDimV> tile;
  tile.lane = place.lane;
  tile.load_row_tile(b, w);                                                // [1]
  for_each_step<kDimQk, kDimV, true, 8>(tile, b, w, place, shared, k, v);  // [2] [3] [4]
  tile.finish_rows();
  store_partial<T, kDimV, 8>(tile, b, w, place, shared);  // [5]
}

/// Of a simdgroup. shared: float[shared_floats(true, 8, ...)].
template <typename T, int kDimQk, int kDimV>
KV_FN void attend_matrix(KV_THREAD const AttendBuffers<T>& b, KV_THREADGROUP float* shared,
                         KV_THREAD const Place& place) {
  const Work w = find_work(b, place, 8, step_tokens(true, 8));
  run_matrix_tile<kDimQk, kDimV>(b, shared, place, w, device_rows(b.k, b.k_strides, w),
                                 device_rows(b.v, b.v_strides, w));
}

}  // namespace kvonce_metal
