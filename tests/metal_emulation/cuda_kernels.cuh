// The shipped body files, compiled as CUDA, for the file that defines which instances and how loops unroll. A profiler sees
// attend_vector, attend_matrix, attend_per_head and merge_partials with their template arguments.
#pragma once

#include "cuda_kernels.hpp"
#include "dialect_cuda.h"
// After the dialect.
#include "body_arguments.hpp"

namespace kvonce::emulation {
namespace {

__device__ kvonce_metal::Place place_of_thread() {
  return {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z),
          static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32)};
}

extern __shared__ float shared_memory[];

// The cases ask for threadgroups of up to this many threads, whatever registers a body would like.
constexpr int kMostThreads = 1024;

template <typename T, int kDimQk, int kDimV, int kRows>
__global__ void __launch_bounds__(kMostThreads) attend_vector(AttendArgs args) {
  kvonce_metal::attend_vector<T, kDimQk, kDimV, kRows>(buffers_of<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimQk, int kDimV>
__global__ void __launch_bounds__(kMostThreads) attend_matrix(AttendArgs args) {
  kvonce_metal::attend_matrix<T, kDimQk, kDimV>(buffers_of<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimQk, int kDimV>
__global__ void __launch_bounds__(kMostThreads) attend_per_head(AttendArgs args) {
  kvonce_metal::attend_per_head<T, kDimQk, kDimV>(buffers_of<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimQk, int kDimV, int kRows, int kBits, int kGroup>
__global__ void __launch_bounds__(kMostThreads) attend_affine_vector(AttendArgs args) {
  kvonce_metal::attend_affine_vector<T, kDimQk, kDimV, kRows, kBits, kGroup>(
      buffers_of<T>(args), affine_k<T>(args), affine_v<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimQk, int kDimV, int kBits, int kGroup>
__global__ void __launch_bounds__(kMostThreads) attend_affine_matrix(AttendArgs args) {
  kvonce_metal::attend_affine_matrix<T, kDimQk, kDimV, kBits, kGroup>(
      buffers_of<T>(args), affine_k<T>(args), affine_v<T>(args), shared_memory, place_of_thread());
}
template <typename T, int kDimV>
__global__ void __launch_bounds__(kMostThreads) merge_partials(MergeArgs a) {
  kvonce_metal::merge_partials<T, kDimV>({a.partial_o, a.partial_sums, a.sinks, a.params}, static_cast<T*>(a.out),
                                         a.lse, shared_memory, place_of_thread());
}

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
