// K and V in MLX's affine formats: codes of 8 or 4 bits, and a scale and a bias for every kGroup values: value = scale * code
// + bias. The bodies are those of attend.metal.h and attend_matrix.metal.h; only loading differs.
//
// Buffers in this order: q, k, k_scales, k_biases, v, v_scales, v_biases, then as attend_* from kv_lens on (params.h), and
//   k_strides .. v_biases_strides. k, v: uint32 [num_seqs, num_kv_heads, kv_len, dim * kBits / 32], the lowest bits first;
//   scales and biases: T [num_seqs, num_kv_heads, kv_len, dim / kGroup]; any strides.
// Threadgroup memory: shared_floats(..., element_bytes 4, ...): staged values are float32.
// Bytes: every byte of the codes once; a scale and a bias are one load of the lanes that need them, at the same address.
// Not here: head dims that are no multiple of 64; kGroup other than 32, 64, 128; attend_per_head.
#pragma once

#include "metal/attend.metal.h"
#include "metal/attend_matrix.metal.h"

namespace kvonce_metal {

/// One of K and V.
template <typename T>
struct AffineTensor {
  KV_DEVICE const unsigned char* codes;
  KV_DEVICE const T* scales;
  KV_DEVICE const T* biases;
  KV_CONSTANT const int64_t* strides;  // of the codes, in uint32
  KV_CONSTANT const int64_t* scales_strides;
  KV_CONSTANT const int64_t* biases_strides;
};

/// As Rows, of one KV head.
template <typename T, int kBits, int kGroup>
struct AffineRows {
  typedef float Element;
  KV_DEVICE const unsigned char* codes;
  KV_DEVICE const T* scales;
  KV_DEVICE const T* biases;
  int64_t token_bytes;
  int64_t word_bytes;
  int64_t scales_token_stride;
  int64_t scales_group_stride;
  int64_t biases_token_stride;
  int64_t biases_group_stride;
};

template <int kBits, int kGroup, typename T>
KV_FN AffineRows<T, kBits, kGroup> affine_rows(KV_THREAD const AffineTensor<T>& x, KV_THREAD const Work& w) {
  AffineRows<T, kBits, kGroup> rows;
  rows.codes = x.codes + 4 * (w.seq * x.strides[0] + w.kv_head * x.strides[1]);
  rows.scales = x.scales + w.seq * x.scales_strides[0] + w.kv_head * x.scales_strides[1];
  rows.biases = x.biases + w.seq * x.biases_strides[0] + w.kv_head * x.biases_strides[1];
  rows.token_bytes = 4 * x.strides[2];
  rows.word_bytes = 4 * x.strides[3];
  rows.scales_token_stride = x.scales_strides[2];
  rows.scales_group_stride = x.scales_strides[3];
  rows.biases_token_stride = x.biases_strides[2];
  rows.biases_group_stride = x.biases_strides[3];
  return rows;
}

/// Dims [dim, dim + kCount) of a token, neighbours in one group and a whole number of bytes.
template <int kCount, typename T, int kBits, int kGroup>
KV_FN void load_neighbours(KV_THREAD const AffineRows<T, kBits, kGroup>& rows, int token, int dim, bool is_token,
                           KV_THREAD float (&x)[kCount]) {
  static_assert(kBits == 8 || kBits == 4, "codes have 8 or 4 bits");
  static_assert(kCount * kBits % 8 == 0 && kGroup % kCount == 0, "neighbours are whole bytes of one group");
  if (!is_token) {
    KV_UNROLL
    for (int e = 0; e < kCount; e++) x[e] = 0.0f;
    return;
  }
  const float scale = float(rows.scales[token * rows.scales_token_stride + dim / kGroup * rows.scales_group_stride]);
  const float bias = float(rows.biases[token * rows.biases_token_stride + dim / kGroup * rows.biases_group_stride]);
  KV_DEVICE const unsigned char* row = rows.codes + token * rows.token_bytes;
  KV_UNROLL
  for (int i = 0; i < kCount * kBits / 8; i++) {
    const int byte_idx = dim * kBits / 8 + i;
    const int byte = row[byte_idx / 4 * rows.word_bytes + byte_idx % 4];
    if (kBits == 8) {
      x[i] = multiply_add(scale, float(byte), bias);
    } else {
      x[2 * i % kCount] = multiply_add(scale, float(byte & 15), bias);
      x[(2 * i + 1) % kCount] = multiply_add(scale, float(byte >> 4), bias);
    }
  }
}

template <int kDim, typename T, int kBits, int kGroup>
KV_FN void load_token(KV_THREAD const AffineRows<T, kBits, kGroup>& rows, int token, bool is_token, int lane,
                      KV_THREAD float (&x)[LaneDims<kDim>::kCount]) {
  static_assert(kDim % 64 == 0, "head dims of affine caches are multiples of 64");
  enum : int { kVector = LaneDims<kDim>::kVector, kParts = LaneDims<kDim>::kParts };
  KV_UNROLL
  for (int part = 0; part < kParts; part++) {
    float y[kVector];
    const int dim = LaneDims<kDim>::dim(lane, part * kVector);
    load_neighbours<kVector>(rows, token, dim, is_token && LaneDims<kDim>::exists(lane, part * kVector), y);
    KV_UNROLL
    for (int e = 0; e < kVector; e++) x[part * kVector + e] = y[e];
  }
}

/// As attend_vector; b.k and b.v are not used.
template <typename T, int kDimQk, int kDimV, int kRows, int kBits, int kGroup>
KV_FN void attend_affine_vector(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const AffineTensor<T>& k,
                                KV_THREAD const AffineTensor<T>& v, KV_THREADGROUP float* shared,
                                KV_THREAD const Place& place) {
  const Work w = find_work(b, place, kRows, step_tokens(false, kRows));
  run_vector_tile<kDimQk, kDimV, kRows>(b, shared, place, w, affine_rows<kBits, kGroup>(k, w),
                                        affine_rows<kBits, kGroup>(v, w));
}

/// As attend_matrix; b.k and b.v are not used.
template <typename T, int kDimQk, int kDimV, int kBits, int kGroup>
KV_FN void attend_affine_matrix(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const AffineTensor<T>& k,
                                KV_THREAD const AffineTensor<T>& v, KV_THREADGROUP float* shared,
                                KV_THREAD const Place& place) {
  const Work w = find_work(b, place, 8, step_tokens(true, 8));
  run_matrix_tile<kDimQk, kDimV>(b, shared, place, w, affine_rows<kBits, kGroup>(k, w),
                                 affine_rows<kBits, kGroup>(v, w));
}

}  // namespace kvonce_metal
