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

/// Tokens of one KV head as a step finds them: token t's row is at data + (t - first) * token_stride. Pointer: into device
/// or threadgroup memory.
template <typename Pointer>
struct Rows {
  Pointer data;
  int64_t token_stride;
  int64_t dim_stride;
  int first;
};

template <typename Pointer>
KV_FN Pointer row_of(KV_THREAD const Rows<Pointer>& rows, int token) {
  return rows.data + (token - rows.first) * rows.token_stride;
}

template <typename T>
KV_FN Rows<KV_DEVICE const T*> device_rows(KV_DEVICE const T* data, KV_CONSTANT const int64_t* strides, int seq,
                                           int head) {
  Rows<KV_DEVICE const T*> rows;
  rows.data = data + seq * strides[0] + head * strides[1];
  rows.token_stride = strides[2];
  rows.dim_stride = strides[3];
  rows.first = 0;
  return rows;
}

/// Copies tokens [first, first + count) into threadgroup memory, [count, kDim] packed, zeros from `end` on. The simdgroups of
/// the threadgroup take a token each in turn.
template <int kDim, typename T>
KV_FN Rows<KV_THREADGROUP const T*> stage_rows(KV_THREAD const Rows<KV_DEVICE const T*>& from, KV_THREADGROUP T* to,
                                               int first, int count, int end, KV_THREAD const Place& place,
                                               int num_simdgroups) {
  for (int i = place.simdgroup; i < count; i += num_simdgroups) {
    const bool is_token = first + i < end;
    T x[LaneDims<kDim>::kCount];
    load_dims<kDim, T>(row_of(from, is_token ? first + i : first), from.dim_stride, is_token, place.lane, x);
    KV_UNROLL
    for (int e = 0; e < LaneDims<kDim>::kCount; e++) {
      if (LaneDims<kDim>::exists(place.lane, e)) to[i * kDim + LaneDims<kDim>::dim(place.lane, e)] = x[e];
    }
  }
  Rows<KV_THREADGROUP const T*> rows;
  rows.data = to;
  rows.token_stride = kDim;
  rows.dim_stride = 1;
  rows.first = first;
  return rows;
}

/// Runs the simdgroup's tokens through `tile`, a step at a time. Where row tiles share the tokens, through threadgroup memory.
template <typename T, int kDimQk, int kDimV, bool kMatrix, int kRows, typename Tile>
KV_FN void for_each_step(KV_THREAD Tile& tile, KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w,
                         KV_THREAD const Place& place, KV_THREADGROUP float* shared) {
  const Rows<KV_DEVICE const T*> k = device_rows(b.k, b.k_strides, w.seq, w.kv_head);
  const Rows<KV_DEVICE const T*> v = device_rows(b.v, b.v_strides, w.seq, w.kv_head);
  const int row_tiles = param(b.params, kRowTiles);
  constexpr int kStep = step_tokens(kMatrix, kRows);
  if (row_tiles <= 1) {
    for (int token = w.tokens.begin; token < w.tokens.end; token += kStep) tile.take_step(b, w, k, v, token);
    return;
  }
  constexpr int kStage = stage_tokens(kMatrix, kRows, kDimQk, kDimV, int(sizeof(T)));
  KV_THREADGROUP T* k_stage = (KV_THREADGROUP T*)shared;
  KV_THREADGROUP T* v_stage = k_stage + kStage * kDimQk;
  for (int first = w.tokens.begin; first < w.tokens.end; first += kStage) {
    const int count = smaller_int(kStage, round_up(w.tokens.end - first, kStep));
    barrier();  // the stage before has been used
    const Rows<KV_THREADGROUP const T*> k_rows =
        stage_rows<kDimQk, T>(k, k_stage, first, count, w.tokens.end, place, row_tiles);
    const Rows<KV_THREADGROUP const T*> v_rows =
        stage_rows<kDimV, T>(v, v_stage, first, count, w.tokens.end, place, row_tiles);
    barrier();
    for (int i = 0; i < count; i += kStep) tile.take_step(b, w, k_rows, v_rows, first + i);
  }
}

}  // namespace kvonce_metal
