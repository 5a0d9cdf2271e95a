// K and V on their way into registers: how the dims of a row lie over the lanes, and threadgroup memory where row tiles share
// a token.
#pragma once

#include "metal/work.metal.h"

namespace kvonce_metal {

/// Element e of a lane is dim (e / kVector) * 32 * kVector + lane * kVector + e % kVector: neighbours lie together. Dims past
/// kDim are zero.
template <int kDim>
struct LaneDims {
  enum : int {
    kVector = kDim % 128 == 0  ? 4
              : kDim % 64 == 0 ? 2
                               : 1,
    kParts = (kDim + 32 * kVector - 1) / (32 * kVector),
    kCount = kParts * kVector,
    kAllExist = kDim % (32 * kVector) == 0 ? 1 : 0,
  };
  static KV_FN int dim(int lane, int e) { return e / kVector * (32 * kVector) + lane * kVector + e % kVector; }
  static KV_FN bool exists(int lane, int e) { return kAllExist != 0 || dim(lane, e) < kDim; }
};

/// A lane's elements of a row, zeros without one.
template <int kDim, typename T, typename Pointer>
KV_FN void load_dims(Pointer row, int64_t dim_stride, bool is_token, int lane,
                     KV_THREAD T (&x)[LaneDims<kDim>::kCount]) {
  if (!is_token) {
    KV_UNROLL
    for (int e = 0; e < LaneDims<kDim>::kCount; e++) x[e] = T(0.0f);
  } else if (dim_stride == 1) {
    KV_UNROLL
    for (int e = 0; e < LaneDims<kDim>::kCount; e++) {
      x[e] = LaneDims<kDim>::exists(lane, e) ? row[LaneDims<kDim>::dim(lane, e)] : T(0.0f);
    }
  } else {
    KV_UNROLL
    for (int e = 0; e < LaneDims<kDim>::kCount; e++) {
      x[e] = LaneDims<kDim>::exists(lane, e) ? row[LaneDims<kDim>::dim(lane, e) * dim_stride] : T(0.0f);
    }
  }
}

/// Tokens of one KV head as a step finds them: token t's row is at data + (t - first) * token_stride. Pointer: to T, in device
/// or threadgroup memory. Other formats have a type of their own with the same functions (affine.metal.h).
template <typename T, typename Pointer>
struct Rows {
  typedef T Element;  // what a load leaves in registers
  Pointer data;
  int64_t token_stride;
  int64_t dim_stride;
  int first;
};

template <typename T, typename Pointer>
KV_FN Pointer row_of(KV_THREAD const Rows<T, Pointer>& rows, int token) {
  return rows.data + (token - rows.first) * rows.token_stride;
}

/// A lane's elements of a token. Without one (is_token false) they are zeros and nothing is read.
template <int kDim, typename T, typename Pointer>
KV_FN void load_token(KV_THREAD const Rows<T, Pointer>& rows, int token, bool is_token, int lane,
                      KV_THREAD T (&x)[LaneDims<kDim>::kCount]) {
  load_dims<kDim, T>(row_of(rows, is_token ? token : rows.first), rows.dim_stride, is_token, lane, x);
}

/// `kCount` neighbouring dims of a token from `dim` on, a multiple of kCount; zeros without a token.
template <int kCount, typename T, typename Pointer>
KV_FN void load_neighbours(KV_THREAD const Rows<T, Pointer>& rows, int token, int dim, bool is_token,
                           KV_THREAD float (&x)[kCount]) {
  Pointer row = row_of(rows, is_token ? token : rows.first);
  if (!is_token) {
    KV_UNROLL
    for (int e = 0; e < kCount; e++) x[e] = 0.0f;
  } else if (rows.dim_stride == 1) {
    KV_UNROLL
    for (int e = 0; e < kCount; e++) x[e] = float(row[dim + e]);
  } else {
    KV_UNROLL
    for (int e = 0; e < kCount; e++) x[e] = float(row[(dim + e) * rows.dim_stride]);
  }
}

template <typename T>
KV_FN Rows<T, KV_DEVICE const T*> device_rows(KV_DEVICE const T* data, KV_CONSTANT const int64_t* strides,
                                              KV_THREAD const Work& w) {
  Rows<T, KV_DEVICE const T*> rows;
  rows.data = data + w.seq * strides[0] + w.kv_head * strides[1];
  rows.token_stride = strides[2];
  rows.dim_stride = strides[3];
  rows.first = 0;
  return rows;
}

/// Copies tokens [first, first + count) into threadgroup memory, [count, kDim] packed, zeros from `end` on. The simdgroups of
/// the threadgroup take a token each in turn.
template <int kDim, typename Source, typename T>
KV_FN Rows<T, KV_THREADGROUP const T*> stage_rows(KV_THREAD const Source& from, KV_THREADGROUP T* to, int first,
                                                  int count, int end, KV_THREAD const Place& place,
                                                  int num_simdgroups) {
  for (int i = place.simdgroup; i < count; i += num_simdgroups) {
    T x[LaneDims<kDim>::kCount];
    load_token<kDim>(from, first + i, first + i < end, place.lane, x);
    KV_UNROLL
    for (int e = 0; e < LaneDims<kDim>::kCount; e++) {
      if (LaneDims<kDim>::exists(place.lane, e)) to[i * kDim + LaneDims<kDim>::dim(place.lane, e)] = x[e];
    }
  }
  Rows<T, KV_THREADGROUP const T*> rows;
  rows.data = to;
  rows.token_stride = kDim;
  rows.dim_stride = 1;
  rows.first = first;
  return rows;
}

/// The tokens of a threadgroup whose row tiles share them: whole steps of K and V, or pieces of kPiece tokens.
template <int kDimQk, int kDimV, bool kMatrix, int kRows, int kPiece>
struct SharedSteps {
  template <typename T, typename Tile, typename K, typename V>
  static KV_FN void run(KV_THREAD Tile& tile, KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w,
                        KV_THREAD const Place& place, KV_THREADGROUP float* shared, KV_THREAD const K& k,
                        KV_THREAD const V& v, int row_tiles) {
    constexpr int kStep = step_tokens(kMatrix, kRows);
    for (int token = w.tokens.begin; token < w.tokens.end; token += kStep) {
      tile.template take_step_in_pieces<kPiece>(b, w, place, shared, k, v, token, row_tiles);
    }
  }
};
template <int kDimQk, int kDimV, bool kMatrix, int kRows>
struct SharedSteps<kDimQk, kDimV, kMatrix, kRows, 0> {
  template <typename T, typename Tile, typename K, typename V>
  static KV_FN void run(KV_THREAD Tile& tile, KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w,
                        KV_THREAD const Place& place, KV_THREADGROUP float* shared, KV_THREAD const K& k,
                        KV_THREAD const V& v, int row_tiles) {
    typedef typename K::Element Element;  // of V too
    constexpr int kStep = step_tokens(kMatrix, kRows);
    constexpr int kStage = stage_tokens(kMatrix, kRows, kDimQk, kDimV, int(sizeof(Element)));
    KV_THREADGROUP Element* k_stage = (KV_THREADGROUP Element*)shared;
    KV_THREADGROUP Element* v_stage = k_stage + kStage * kDimQk;
    for (int first = w.tokens.begin; first < w.tokens.end; first += kStage) {
      const int count = smaller_int(kStage, round_up(w.tokens.end - first, kStep));
      barrier();  // the stage before has been used
      const Rows<Element, KV_THREADGROUP const Element*> k_rows =
          stage_rows<kDimQk>(k, k_stage, first, count, w.tokens.end, place, row_tiles);
      const Rows<Element, KV_THREADGROUP const Element*> v_rows =
          stage_rows<kDimV>(v, v_stage, first, count, w.tokens.end, place, row_tiles);
      barrier();
      for (int i = 0; i < count; i += kStep) tile.take_step(b, w, k_rows, v_rows, first + i);
    }
  }
};

/// Runs the simdgroup's tokens of K and V through `tile`, a step at a time. Where row tiles share the tokens, through
/// threadgroup memory. K and V: Rows, or another format's.
template <int kDimQk, int kDimV, bool kMatrix, int kRows, typename T, typename Tile, typename K, typename V>
KV_FN void for_each_step(KV_THREAD Tile& tile, KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w,
                         KV_THREAD const Place& place, KV_THREADGROUP float* shared, KV_THREAD const K& k,
                         KV_THREAD const V& v) {
  const int row_tiles = param(b.params, kRowTiles);
  constexpr int kStep = step_tokens(kMatrix, kRows);
  if (row_tiles <= 1) {
    for (int token = w.tokens.begin; token < w.tokens.end; token += kStep) tile.take_step(b, w, k, v, token);
    return;
  }
  constexpr int kPiece = piece_tokens(kMatrix, kRows, kDimQk, kDimV, int(sizeof(typename K::Element)));
  SharedSteps<kDimQk, kDimV, kMatrix, kRows, kPiece>::run(tile, b, w, place, shared, k, v, row_tiles);
}

}  // namespace kvonce_metal
