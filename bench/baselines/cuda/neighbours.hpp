// The kernels around attention in `kvonce bench --chain`: a producer that writes q and the newest rows of K and V, and a
// consumer that reads the result. A producer reads what the consumer before it wrote, so that a chain cannot be reordered.
// Functions enqueue on `stream`, allocate nothing, may be captured in a graph and return the launch's error. Pointers are
// device memory unless said otherwise.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvonce::bench::cuda {

/// How the neighbours are launched. The numbers are those of the C functions in neighbours_c.cpp.
enum class NeighbourForm : int {
  plain = 0,  // as any kernel
  late = 1,   // programmatic stream serialisation; waits, and lets the next kernel start only by ending
  early = 2,  // programmatic stream serialisation; lets the next kernel start at once, then waits
};

/// Rows of a tensor that are written from a packed copy, up to 2 GiB in all. Sizes, strides and pointers: multiples of 4
/// bytes; words of 16 bytes are copied where all of them are multiples of 16.
struct NeighbourRows {
  void* to = nullptr;          // [num_seqs, num_heads, num_tokens] rows, strides in bytes
  const void* from = nullptr;  // the same rows without gaps
  std::int64_t row_bytes = 0;
  std::int64_t seq_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t num_seqs = 1;
  std::int64_t num_heads = 1;
  std::int64_t num_tokens = 1;
};

/// What the producer writes.
struct Produced {
  NeighbourRows q;
  NeighbourRows k;
  NeighbourRows v;
};

/// Floats that a consumer writes and the next producer reads. Zero before the first call.
constexpr std::int64_t kConsumedFloats = 1024;

cudaError_t run_produce(NeighbourForm form, const Produced& produced, const float* consumed, cudaStream_t stream);

/// consumed [kConsumedFloats] from every word of out; out_bytes: a multiple of 4.
cudaError_t run_consume(NeighbourForm form, const void* out, std::size_t out_bytes, float* consumed,
                        cudaStream_t stream);

/// What run_consume() leaves for these bytes in host memory, a multiple of 16.
std::vector<float> consumed_of(const std::vector<std::byte>& out);

}  // namespace kvonce::bench::cuda
