// The names that the kernel bodies are written in (src/metal/dialect.h), for CUDA: a simdgroup is a warp, a threadgroup a block.
// What this shows is the algorithm: results and bytes. Nothing here is tuned, and no time of it means anything for Metal.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#define KV_DEVICE
#define KV_CONSTANT
#define KV_THREADGROUP
#define KV_THREAD
#define KV_FN __device__ __forceinline__
#if defined(KVONCE_METAL_KEEP_LOOPS)
#define KV_UNROLL _Pragma("unroll 1")
#else
#define KV_UNROLL _Pragma("unroll")
#endif

namespace kvonce_metal {

using half = __half;
using bfloat = __nv_bfloat16;

constexpr unsigned kWholeWarp = 0xffffffffU;

KV_FN float shuffle(float x, int lane) { return __shfl_sync(kWholeWarp, x, lane); }
KV_FN float shuffle_xor(float x, int mask) { return __shfl_xor_sync(kWholeWarp, x, mask); }
KV_FN float sum_lanes(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
  return x;
}
KV_FN float max_lanes(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, shuffle_xor(x, distance));
  return x;
}
KV_FN void barrier() { __syncthreads(); }

KV_FN float exp2_fast(float x) { return exp2f(x); }
KV_FN float log2_of(float x) { return log2f(x); }
KV_FN float tanh_of(float x) { return tanhf(x); }
KV_FN float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
KV_FN float larger(float a, float b) { return fmaxf(a, b); }

KV_FN int matrix_row(int lane) { return (lane & 16) / 4 + (lane & 6) / 2; }
KV_FN int matrix_column(int lane) { return (lane & 8) / 2 + (lane & 1) * 2; }

/// A call, since a kernel has hundreds. Element by element: a's row comes from the four lanes that hold it, b's columns from the eight.
__device__ __noinline__ void matrix_multiply_add(float2& d, float2 a, float2 b) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int from_a = (lane & 22) + (k & 4) * 2 + (k & 2) / 2;
    const int from_b = (k & 4) * 4 + (k & 3) * 2 + (lane & 9);
    const float a_k = shuffle(k % 2 == 0 ? a.x : a.y, from_a);
    d.x = fmaf(a_k, shuffle(b.x, from_b), d.x);
    d.y = fmaf(a_k, shuffle(b.y, from_b), d.y);
  }
}

}  // namespace kvonce_metal
