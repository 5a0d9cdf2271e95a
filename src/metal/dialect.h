// What the kernel bodies are written in, for Metal. A body uses nothing else of Metal than its types and these names, so that
// it also compiles as C++ (tests/metal_emulation/dialect_host.h) and CUDA (dialect_cuda.h), which define the same.
// A launcher puts the files together in this order, without their #include and #pragma lines:
//   params.h dialect.h work.metal.h tokens.metal.h join.metal.h, then attend.metal.h, attend_matrix.metal.h,
//   attend_per_head.metal.h or merge.metal.h.
// Address spaces are written as these macros only; C++14; ASCII; float literals end in f.
#pragma once

#define KV_DEVICE device
#define KV_CONSTANT constant
#define KV_THREADGROUP threadgroup
#define KV_THREAD thread
#define KV_FN inline
#define KV_UNROLL _Pragma("clang loop unroll(full)")

namespace kvonce_metal {

// Over the 32 lanes of a simdgroup; every lane must arrive.
KV_FN float sum_lanes(float x) { return metal::simd_sum(x); }
KV_FN float max_lanes(float x) { return metal::simd_max(x); }
KV_FN float shuffle(float x, int lane) { return metal::simd_shuffle(x, ushort(lane)); }
KV_FN float shuffle_xor(float x, int mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }

/// Every thread of the threadgroup must arrive; orders threadgroup memory.
KV_FN void barrier() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }

KV_FN float exp2_fast(float x) { return metal::fast::exp2(x); }
KV_FN float log2_of(float x) { return metal::precise::log2(x); }
KV_FN float tanh_of(float x) { return metal::precise::tanh(x); }
KV_FN float multiply_add(float a, float b, float c) { return metal::fma(a, b, c); }
KV_FN float larger(float a, float b) { return metal::fmax(a, b); }

/// Lane's place in an 8x8 matrix: it holds columns matrix_column and matrix_column + 1 of row matrix_row.
KV_FN int matrix_row(int lane) { return (lane & 16) / 4 + (lane & 6) / 2; }
KV_FN int matrix_column(int lane) { return (lane & 8) / 2 + (lane & 1) * 2; }

/// d += a * b, 8x8 matrices of which a lane holds two elements; every lane must arrive.
KV_FN void matrix_multiply_add(KV_THREAD float2& d, float2 a, float2 b) {
  metal::simdgroup_matrix<float, 8, 8> a_matrix;
  metal::simdgroup_matrix<float, 8, 8> b_matrix;
  metal::simdgroup_matrix<float, 8, 8> d_matrix;
  a_matrix.thread_elements()[0] = a.x;
  a_matrix.thread_elements()[1] = a.y;
  b_matrix.thread_elements()[0] = b.x;
  b_matrix.thread_elements()[1] = b.y;
  d_matrix.thread_elements()[0] = d.x;
  d_matrix.thread_elements()[1] = d.y;
  metal::simdgroup_multiply_accumulate(d_matrix, a_matrix, b_matrix, d_matrix);
  d.x = d_matrix.thread_elements()[0];
  d.y = d_matrix.thread_elements()[1];
}

}  // namespace kvonce_metal
