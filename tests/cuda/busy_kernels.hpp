// Kernels that tests run beside or before attend(). Each enqueues and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kvonce::cuda_test {

/// Reads `bytes` (a multiple of 16) with `blocks` blocks of 1024 threads; `sink`: a word of device memory.
cudaError_t read_memory(cudaStream_t stream, int blocks, const void* data, std::size_t bytes, std::uint32_t* sink);

/// Keeps `blocks` multiprocessors from running anything else, for so long.
cudaError_t hold_multiprocessors(cudaStream_t stream, int blocks, int microseconds);

/// As hold_multiprocessors() until *released is not 0, two words of device memory; the second one becomes 1 where that takes longer
/// than `microseconds`.
cudaError_t hold_until_released(cudaStream_t stream, int blocks, int microseconds, std::uint32_t* released);

struct Piece {
  void* to;
  const void* from;
  std::size_t bytes;
};
struct Pieces {
  Piece piece[3];
};
/// Lets a kernel that was launched to overlap it start at once, waits, and then copies.
cudaError_t write_late(cudaStream_t stream, const Pieces& pieces, int microseconds);

}  // namespace kvonce::cuda_test
