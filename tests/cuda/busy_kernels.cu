#include "busy_kernels.hpp"

#include "kvonce/cuda.cuh"

namespace kvonce::cuda_test {
namespace {

__device__ void wait_microseconds(int microseconds) {
  std::uint64_t begin = 0;
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < static_cast<std::uint64_t>(microseconds) * 1000);
}

__global__ void read_kernel(const uint4* data, std::size_t count, std::uint32_t* sink) {
  uint4 sum = {0, 0, 0, 0};
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    const uint4 v = data[i];
    sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
  }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678U) *sink = sum.x;
}

__global__ void hold_kernel(int microseconds) { wait_microseconds(microseconds); }

__global__ void hold_until_kernel(int microseconds, volatile std::uint32_t* released) {
  for (int passed = 0; *released == 0; ++passed) {
    if (passed == microseconds) {
      released[1] = 1;
      return;
    }
    wait_microseconds(1);
  }
}

__global__ void late_kernel(Pieces pieces, int microseconds) {
  cuda_trigger_dependents();
  if (threadIdx.x == 0) wait_microseconds(microseconds);
  __syncthreads();
  for (const Piece& piece : pieces.piece) {
    for (std::size_t i = threadIdx.x; i < piece.bytes; i += blockDim.x) {
      static_cast<unsigned char*>(piece.to)[i] = static_cast<const unsigned char*>(piece.from)[i];
    }
  }
}

}  // namespace

cudaError_t read_memory(cudaStream_t stream, int blocks, const void* data, std::size_t bytes, std::uint32_t* sink) {
  read_kernel<<<static_cast<unsigned>(blocks), 1024, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16, sink);
  return cudaGetLastError();
}

// A block that asks for all the shared memory of a multiprocessor has it to itself.
template <class... Arguments>
static cudaError_t launch_alone(cudaStream_t stream, int blocks, void (*kernel)(Arguments...), Arguments... arguments) {
  int device = 0;
  int shared_bytes = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), 32, static_cast<std::size_t>(shared_bytes), stream>>>(arguments...);
  return cudaGetLastError();
}

cudaError_t hold_multiprocessors(cudaStream_t stream, int blocks, int microseconds) {
  return launch_alone(stream, blocks, hold_kernel, microseconds);
}

cudaError_t hold_until_released(cudaStream_t stream, int blocks, int microseconds, std::uint32_t* released) {
  return launch_alone<int, volatile std::uint32_t*>(stream, blocks, hold_until_kernel, microseconds, released);
}

cudaError_t write_late(cudaStream_t stream, const Pieces& pieces, int microseconds) {
  late_kernel<<<1, 256, 0, stream>>>(pieces, microseconds);
  return cudaGetLastError();
}

}  // namespace kvonce::cuda_test
