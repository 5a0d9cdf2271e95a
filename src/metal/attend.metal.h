// The vector body: one simdgroup keeps kRows rows of a KV stream in registers and reads each token once for all of them.
//
// Shapes: params.h. A KV stream (sequence, KV head) has group_size * q_len rows.
// Work split: threadgroup (chunk, KV head x row block, sequence); its simdgroups take contiguous parts of the chunk, or a row
//   tile each of more rows than one simdgroup holds.
//
//     tokens  |-- chunk 0 --|-- chunk 1 --|--   a step: 32 (row, token) pairs, kRows rows x 32 / kRows tokens
//              sg0 sg1 .. sgN                      t0 t1 t2 t3
//              each: its own part, all rows     r0  0  1  2  3   <- the lane that owns the pair's score,
//                                               r1  4  5  6  7      exponential and weight
//                                               ..
// Steps: [1] q as stored, a lane holds dims (LaneDims) of every row
//        [2] 32 partial dot products in every lane; a butterfly of 31 shuffles leaves pair i's score in lane i
//        [3] one exponential of a weight and one of a rescale per lane, so per 32 pairs
//        [4] values: a token's V is read once, each row's weight comes from its lane
//        [5] partials: normalised o and lse, joined over the token parts in threadgroup memory
// Bytes: kv_len * (dqk + dv) * sizeof(T) for every stream and row block, once.
// Registers: kRows * (dqk / 64 (16-bit q) + dv / 32) + 32 floats and a token: 80 and the token at kRows 8 and d128.
// Not here: paged caches, tree masks, segments, mask slopes; other K and V formats (affine.metal.h).
#pragma once

#include "metal/join.metal.h"
#include "metal/tokens.metal.h"

namespace kvonce_metal {

/// Of 2 * kHalf values, lanes with bit kHalf keep the upper half and the others the lower, each added to the other lane's.
template <int kHalf>
struct Butterfly {
  static KV_FN void run(KV_THREAD float (&x)[32], int lane) {
    const bool upper = (lane & kHalf) != 0;
    KV_UNROLL
    for (int i = 0; i < kHalf; i++) {
      const float kept = upper ? x[i + kHalf] : x[i];
      const float given = upper ? x[i] : x[i + kHalf];
      x[i] = kept + shuffle_xor(given, kHalf);
    }
    Butterfly<kHalf / 2>::run(x, lane);
  }
};
template <>
struct Butterfly<0> {
  static KV_FN void run(KV_THREAD float (&)[32], int) {}
};

template <typename T, int kDimQk, int kDimV, int kRows>
struct VectorTile {
  enum : int {
    kTokens = 32 / kRows,
    kQkCount = LaneDims<kDimQk>::kCount,
    kVCount = LaneDims<kDimV>::kCount,
  };

  T q[kRows][kQkCount];
  float o[kRows][kVCount];
  float m;      // of the lane's row, the same in its kTokens lanes
  float l;      // the lane's part of the sum
  float p;      // the score, then the weight of the lane's pair
  RowPlace at;  // of the lane's row
  TokenRange seen;
  int lane;

  /// [1] q of the tile's rows; a row past the last is the last one again.
  KV_FN void load_row_tile(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w) {
    KV_UNROLL
    for (int row = 0; row < kRows; row++) {
      const RowPlace of_row = place_of(b, w, w.row_begin + row);
      load_dims<kDimQk, T>(q_row(b, w, of_row), b.q_strides[3], true, lane, q[row]);
      KV_UNROLL
      for (int e = 0; e < kVCount; e++) o[row][e] = 0.0f;
    }
    m = KV_HIDDEN;
    l = 0.0f;
    at = place_of(b, w, w.row_begin + lane / kTokens);
    seen = visible_tokens(w, at.query);
    if (w.tokens.end < seen.end) seen.end = w.tokens.end;  // the tokens after a part's last are another's
  }

  /// [2] A lane's parts of the dot products with tokens [first, first + kCount) of a step.
  template <int kCount, typename K>
  KV_FN void dot_tokens(KV_THREAD const Work& w, KV_THREAD const K& k, int token, int first,
                        KV_THREAD float (&dots)[32]) {
    KV_UNROLL
    for (int j = 0; j < kCount; j++) {
      const int i = first + j;
      typename K::Element x[kQkCount];
      load_token<kDimQk>(k, token + i, token + i < w.tokens.end, lane, x);
      KV_UNROLL
      for (int row = 0; row < kRows; row++) {
        float dot = 0.0f;
        KV_UNROLL
        for (int e = 0; e < kQkCount; e++) dot = multiply_add(float(q[row][e]), float(x[e]), dot);
        dots[row * kTokens + i] = dot;
      }
    }
  }
  /// The score of the lane's pair.
  KV_FN void score_tokens(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w, int token,
                          KV_THREAD float (&dots)[32]) {
    Butterfly<16>::run(dots, lane);
    p = score_of(b, w, at, seen, token + lane % kTokens, dots[0]);
  }

  /// [3] Running maximum, weights, and the earlier values rescaled.
  KV_FN void update_softmax() {
    float high = p;
    KV_UNROLL
    for (int distance = kTokens / 2; distance > 0; distance /= 2) high = larger(high, shuffle_xor(high, distance));
    high = larger(m, high);
    const float rescale = exp2_fast(m - high);
    m = high;
    p = weight_of(p, m);
    l = multiply_add(l, rescale, p);
    KV_UNROLL
    for (int row = 0; row < kRows; row++) {
      const float row_rescale = shuffle(rescale, row * kTokens);
      KV_UNROLL
      for (int e = 0; e < kVCount; e++) o[row][e] *= row_rescale;
    }
  }

  /// [4] Adds values of a step, as dot_tokens. Where rows see different tokens those without weight stay away: 0 times a NaN
  /// is one.
  template <int kCount, typename V>
  KV_FN void accumulate_values(KV_THREAD const Work& w, KV_THREAD const V& v, int token, int first) {
    KV_UNROLL
    for (int j = 0; j < kCount; j++) {
      const int i = first + j;
      typename V::Element x[kVCount];
      load_token<kDimV>(v, token + i, token + i < w.tokens.end, lane, x);
      KV_UNROLL
      for (int row = 0; row < kRows; row++) {
        const float weight = shuffle(p, row * kTokens + i);
        if (!w.rows_differ || weight != 0.0f) {
          KV_UNROLL
          for (int e = 0; e < kVCount; e++) o[row][e] = multiply_add(weight, float(x[e]), o[row][e]);
        }
      }
    }
  }

  template <typename K, typename V>
  KV_FN void take_step(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w, KV_THREAD const K& k,
                       KV_THREAD const V& v, int token) {
    float dots[32];
    dot_tokens<kTokens>(w, k, token, 0, dots);
    score_tokens(b, w, token, dots);
    update_softmax();
    accumulate_values<kTokens>(w, v, token, 0);
  }

  /// A step whose K, then V, come through threadgroup memory in pieces of kPiece tokens; all simdgroups of the threadgroup.
  template <int kPiece, typename K, typename V>
  KV_FN void take_step_in_pieces(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w,
                                 KV_THREAD const Place& place, KV_THREADGROUP float* shared, KV_THREAD const K& k,
                                 KV_THREAD const V& v, int token, int row_tiles) {
    typedef typename K::Element Element;
    KV_THREADGROUP Element* stage = (KV_THREADGROUP Element*)shared;
    float dots[32];
    KV_UNROLL
    for (int first = 0; first < kTokens; first += kPiece) {
      barrier();  // the piece before has been used
      const Rows<Element, KV_THREADGROUP const Element*> rows =
          stage_rows<kDimQk>(k, stage, token + first, kPiece, w.tokens.end, place, row_tiles);
      barrier();
      dot_tokens<kPiece>(w, rows, token, first, dots);
    }
    score_tokens(b, w, token, dots);
    update_softmax();
    KV_UNROLL
    for (int first = 0; first < kTokens; first += kPiece) {
      barrier();
      const Rows<Element, KV_THREADGROUP const Element*> rows =
          stage_rows<kDimV>(v, stage, token + first, kPiece, w.tokens.end, place, row_tiles);
      barrier();
      accumulate_values<kPiece>(w, rows, token, first);
    }
  }

  /// Adds up the lanes' parts of l.
  KV_FN void finish_rows() {
    KV_UNROLL
    for (int distance = kTokens / 2; distance > 0; distance /= 2) l += shuffle_xor(l, distance);
  }
  KV_FN RowSum row_sum(int row) {
    RowSum sum;
    sum.m = shuffle(m, row * kTokens);
    sum.l = shuffle(l, row * kTokens);
    return sum;
  }
  template <typename Pointer>
  KV_FN void put_values(int row, float scale, Pointer to) {
    KV_UNROLL
    for (int e = 0; e < kVCount; e++) {
      if (LaneDims<kDimV>::exists(lane, e)) to[LaneDims<kDimV>::dim(lane, e)] = scale * o[row][e];
    }
  }
};

/// A simdgroup over K and V of any format.
template <int kDimQk, int kDimV, int kRows, typename T, typename K, typename V>
KV_FN void run_vector_tile(KV_THREAD const AttendBuffers<T>& b, KV_THREADGROUP float* shared,
                           KV_THREAD const Place& place, KV_THREAD const Work& w, KV_THREAD const K& k,
                           KV_THREAD const V& v) {
  VectorTile<T, kDimQk, kDimV, kRows> tile;
  tile.lane = place.lane;
  tile.load_row_tile(b, w);                                                     // [1]
  for_each_step<kDimQk, kDimV, false, kRows>(tile, b, w, place, shared, k, v);  // [2] [3] [4]
  tile.finish_rows();
  store_partial<T, kDimV, kRows>(tile, b, w, place, shared);  // [5]
}

/// Of a simdgroup. shared: float[shared_floats(false, kRows, ...)].
template <typename T, int kDimQk, int kDimV, int kRows>
KV_FN void attend_vector(KV_THREAD const AttendBuffers<T>& b, KV_THREADGROUP float* shared,
                         KV_THREAD const Place& place) {
  const Work w = find_work(b, place, kRows, step_tokens(false, kRows));
  const Rows<T, KV_DEVICE const T*> k = device_rows(b.k, b.k_strides, w);
  const Rows<T, KV_DEVICE const T*> v = device_rows(b.v, b.v_strides, w);
  run_vector_tile<kDimQk, kDimV, kRows>(b, shared, place, w, k, v);
}

}  // namespace kvonce_metal
