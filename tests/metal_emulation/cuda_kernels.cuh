// The shipped body files, compiled as CUDA, for the file that defines which instances and how loops unroll. A profiler sees
// attend_vector, attend_matrix, attend_per_head and merge_partials with their template arguments.
#pragma once

#include "cuda_kernels.hpp"
#include "dialect_cuda.h"
// The bodies, after the dialect.
#include "metal/affine.metal.h"
#include "metal/attend.metal.h"
#include "metal/attend_matrix.metal.h"
#include "metal/attend_per_head.metal.h"
#include "metal/merge.metal.h"

namespace kvonce::emulation {
namespace {

using kvonce_metal::bfloat;
using kvonce_metal::half;

template <typename T>
__device__ kvonce_metal::AttendBuffers<T> buffers_of(const AttendArgs& a) {
  return {static_cast<const T*>(a.q),
          static_cast<const T*>(a.k),
          static_cast<const T*>(a.v),
          a.kv_lens,
          a.kv_starts,
          a.mask,
          a.alibi_slopes,
          a.params,
          a.scalars,
          a.q_strides,
          a.k_strides,
          a.v_strides,
          a.mask_strides,
          a.partial_o,
          a.partial_sums};
}

__device__ kvonce_metal::Place place_of_thread() {
  return {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z),
          static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32)};
}

extern __shared__ float shared_memory[];

template <typename T, int kDimQk, int kDimV, int kRows>
__global__ void attend_vector(AttendArgs args) {
  kvonce_metal::attend_vector<T, kDimQk, kDimV, kRows>(buffers_of<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimQk, int kDimV>
__global__ void attend_matrix(AttendArgs args) {
  kvonce_metal::attend_matrix<T, kDimQk, kDimV>(buffers_of<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimQk, int kDimV>
__global__ void attend_per_head(AttendArgs args) {
  kvonce_metal::attend_per_head<T, kDimQk, kDimV>(buffers_of<T>(args), shared_memory, place_of_thread());
}
template <typename T>
__device__ kvonce_metal::AffineTensor<T> affine_k(const AttendArgs& a) {
  return {static_cast<const unsigned char*>(a.k),
          static_cast<const T*>(a.k_scales),
          static_cast<const T*>(a.k_biases),
          a.k_strides,
          a.k_scales_strides,
          a.k_biases_strides};
}
template <typename T>
__device__ kvonce_metal::AffineTensor<T> affine_v(const AttendArgs& a) {
  return {static_cast<const unsigned char*>(a.v),
          static_cast<const T*>(a.v_scales),
          static_cast<const T*>(a.v_biases),
          a.v_strides,
          a.v_scales_strides,
          a.v_biases_strides};
}
template <typename T, int kDimQk, int kDimV, int kRows, int kBits, int kGroup>
__global__ void attend_affine_vector(AttendArgs args) {
  kvonce_metal::attend_affine_vector<T, kDimQk, kDimV, kRows, kBits, kGroup>(
      buffers_of<T>(args), affine_k<T>(args), affine_v<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimQk, int kDimV, int kBits, int kGroup>
__global__ void attend_affine_matrix(AttendArgs args) {
  kvonce_metal::attend_affine_matrix<T, kDimQk, kDimV, kBits, kGroup>(
      buffers_of<T>(args), affine_k<T>(args), affine_v<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimV>
__global__ void merge_partials(MergeArgs a) {
  kvonce_metal::merge_partials<T, kDimV>({a.partial_o, a.partial_sums, a.sinks, a.params}, static_cast<T*>(a.out),
                                         a.lse, shared_memory, place_of_thread());
}

template <typename T>
constexpr DType kDType = DType::f32;
template <>
constexpr DType kDType<half> = DType::f16;
template <>
constexpr DType kDType<bfloat> = DType::bf16;

struct AttendKernel {
  Instance instance;
  CudaAttend kernel;
};
struct MergeKernel {
  DType dtype;
  int head_dim_v;
  CudaMerge kernel;
};

#define KVONCE_METAL_ATTEND_VECTOR(T, qk, v, rows) \
  {{Body::vector, kDType<T>, qk, v, rows}, attend_vector<T, qk, v, rows>},
#define KVONCE_METAL_ATTEND_OTHER(T, qk, v)                               \
  {{Body::matrix, kDType<T>, qk, v, 8}, attend_matrix<T, qk, v>},         \
      {{Body::per_head, kDType<T>, qk, v, 1}, attend_per_head<T, qk, v>}, \
      {{Body::vector, kDType<T>, qk, v, 8}, attend_vector<T, qk, v, 8>},
#define KVONCE_METAL_ATTEND_DIMS(qk, v) \
  KVONCE_METAL_ATTEND_OTHER(half, qk, v) KVONCE_METAL_ATTEND_VECTOR(half, qk, v, 4)
#define KVONCE_METAL_ATTEND_AFFINE(T, qk, v, rows, bits, group)                                             \
  {{Body::vector, kDType<T>, qk, v, rows, bits, group}, attend_affine_vector<T, qk, v, rows, bits, group>}, \
      {{Body::matrix, kDType<T>, qk, v, 8, bits, group}, attend_affine_matrix<T, qk, v, bits, group>},
#define KVONCE_METAL_MERGE(T, qk, v) {kDType<T>, v, merge_partials<T, v>},

}  // namespace
}  // namespace kvonce::emulation
