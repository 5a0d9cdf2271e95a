// The baseline: one simdgroup per row, so every row fetches K and V itself, and every (row, token) pair takes a sum over the
// lanes and two exponentials in all of them. Chunk i takes tokens i, i + num_chunks, ... of what the rows see.
//
// Bytes: rows * kv_len * (dqk + dv) * sizeof(T) for every stream.
// Not here: what attend.metal.h does not do either; fixed chunks.
#pragma once

#include "metal/join.metal.h"
#include "metal/tokens.metal.h"

namespace kvonce_metal {

template <typename T, int kDimQk, int kDimV>
struct HeadTile {
  enum : int { kQkCount = LaneDims<kDimQk>::kCount, kVCount = LaneDims<kDimV>::kCount };

  float q[kQkCount];
  float o[kVCount];
  float m;
  float l;
  float p;
  float rescale;
  RowPlace at;
  TokenRange seen;
  int lane;

  /// [1]
  KV_FN void load_row_tile(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w) {
    at = place_of(b, w, w.row_begin);
    seen = visible_tokens(w, at.query);
    T x[kQkCount];
    load_dims<kDimQk, T>(q_row(b, w, at), b.q_strides[3], true, lane, x);
    KV_UNROLL
    for (int e = 0; e < kQkCount; e++) q[e] = float(x[e]);
    KV_UNROLL
    for (int e = 0; e < kVCount; e++) o[e] = 0.0f;
    m = KV_HIDDEN;
    l = 0.0f;
  }

  /// [2]
  KV_FN void score_tokens(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w,
                          KV_THREAD const Rows<T, KV_DEVICE const T*>& k, int token) {
    T x[kQkCount];
    load_token<kDimQk>(k, token, true, lane, x);
    float dot = 0.0f;
    KV_UNROLL
    for (int e = 0; e < kQkCount; e++) dot = multiply_add(q[e], float(x[e]), dot);
    p = score_of(b, w, at, seen, token, sum_lanes(dot));
  }

  /// [3]
  KV_FN void update_softmax() {
    const float high = larger(m, p);
    rescale = exp2_fast(m - high);
    p = weight_of(p, high);
    m = high;
    l = multiply_add(l, rescale, p);
  }

  /// [4] A key that its row does not see has its V not read.
  KV_FN void accumulate_values(KV_THREAD const Work& w, KV_THREAD const Rows<T, KV_DEVICE const T*>& v, int token) {
    const bool is_token = !w.rows_differ || p != 0.0f;
    T x[kVCount];
    load_token<kDimV>(v, token, is_token, lane, x);
    KV_UNROLL
    for (int e = 0; e < kVCount; e++) o[e] = multiply_add(o[e], rescale, p * float(x[e]));
  }

  KV_FN RowSum row_sum(int) {
    RowSum sum;
    sum.m = m;
    sum.l = l;
    return sum;
  }
  template <typename Pointer>
  KV_FN void put_values(int, float scale, Pointer to) {
    KV_UNROLL
    for (int e = 0; e < kVCount; e++) {
      if (LaneDims<kDimV>::exists(lane, e)) to[LaneDims<kDimV>::dim(lane, e)] = scale * o[e];
    }
  }
};

/// Of a simdgroup; needs no threadgroup memory.
template <typename T, int kDimQk, int kDimV>
KV_FN void attend_per_head(KV_THREAD const AttendBuffers<T>& b, KV_THREADGROUP float* shared,
                           KV_THREAD const Place& place) {
  Work w = find_rows(b, place, param(b.params, kRowTiles));
  w.row_begin += place.simdgroup;
  if (w.row_begin >= w.num_rows) w.tokens.end = w.tokens.begin;  // no such row
  const Rows<T, KV_DEVICE const T*> k = device_rows(b.k, b.k_strides, w);
  const Rows<T, KV_DEVICE const T*> v = device_rows(b.v, b.v_strides, w);
  HeadTile<T, kDimQk, kDimV> tile;
  tile.lane = place.lane;
  tile.load_row_tile(b, w);  // [1]
  const int num_chunks = param(b.params, kNumChunks);
  for (int64_t token = int64_t(w.tokens.begin) + place.x; token < w.tokens.end; token += num_chunks) {
    tile.score_tokens(b, w, k, int(token));    // [2]
    tile.update_softmax();                     // [3]
    tile.accumulate_values(w, v, int(token));  // [4]
  }
  store_partial<T, kDimV, 1>(tile, b, w, place, shared);  // [5]
}

}  // namespace kvonce_metal
