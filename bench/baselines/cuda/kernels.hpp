// The arms of `kvonce bench --backend cuda` that are not kvonce. Every function enqueues on `stream`, allocates nothing,
// may be captured in a graph, and throws Error{Internal} when a launch fails. Pointers are device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvonce/attend.hpp"
#include "kvonce/problem.hpp"

namespace kvonce::bench::cuda {

/// How the blocks of a read, 512 threads each, take the bytes.
struct ReadShape {
  int blocks_per_sm;
  int loads;   // of 16 bytes per thread and round: 4 or 8
  bool ahead;  // the next round is loaded while one is awaited
};
const std::vector<ReadShape>& read_shapes();
std::string read_kernel_id(const ReadShape& shape);

/// Streams [data, data + bytes); bytes past the last multiple of 16 are left out. data is 16-byte aligned. `keep` xors
/// every 32-bit word into *sum, which the caller has cleared; without it *sum is left alone (and may be changed where
/// the xor of a thread's words happens to be one certain value, which is what keeps the loads alive).
void run_read(const ReadShape& shape, const void* data, std::int64_t bytes, std::uint32_t* sum, bool keep, int num_sms,
              cudaStream_t stream);

/// A dense f16 matrix-vector product over exactly the given bytes: rows of kQmvCols columns and a shorter last one, as
/// bench::Qmv. Columns past the last multiple of 8 are left out.
constexpr std::int64_t kQmvCols = 2048;
std::int64_t qmv_rows(std::int64_t matrix_bytes);
std::int64_t qmv_cols(std::int64_t matrix_bytes, std::int64_t row);
/// matrix is 16-byte aligned; x [kQmvCols], y [qmv_rows(matrix_bytes)].
void run_qmv(const void* matrix, std::int64_t matrix_bytes, const float* x, float* y, int num_sms, cudaStream_t stream);

/// Attention with the work split of MLX's two-pass vector kernel: see per_head.cu.
class PerHead {
 public:
  /// Throws Error{Unsupported} for what the kernel does not serve.
  explicit PerHead(const Problem& problem);
  [[nodiscard]] std::size_t workspace_bytes() const;  // at 256-byte alignment
  [[nodiscard]] std::string kernel_id() const;
  [[nodiscard]] std::int64_t read_factor() const { return problem_.rows_per_stream(); }
  /// out [num_seqs, num_q_heads, q_len, head_dim_v] of out_dtype, packed. Every sequence is max_kv_len tokens long. Rows of
  /// K and V start at multiples of 16 bytes.
  void run(const Inputs& inputs, void* out, void* workspace, cudaStream_t stream) const;

 private:
  Problem problem_;
};

/// What kvonce's launch would take without arithmetic: the blocks of its plan stream the same bytes in equal shares, then
/// join partials of the same size. See floor.cu.
struct FloorShape {
  std::int64_t num_streams = 1;     // num_seqs * num_kv_heads
  std::int64_t splits = 1;          // blocks per stream
  std::int64_t join_blocks = 1;     // of these, those that join: num_streams * (join_blocks - 1) < multiprocessors
  bool cluster = false;             // the blocks of a stream are one cluster
  std::int64_t elements = 1;        // float4 per stream in out and in every partial: rows * head_dim_v / 4
  std::int64_t stream_vectors = 0;  // 16-byte words per stream
  int threads = 256;                // 256 or 512 per block
};
std::string floor_kernel_id(const FloorShape& shape);
std::size_t floor_workspace_bytes(const FloorShape& shape);
/// `workspace` is zero before the first call. out [num_streams, elements] of float4.
void run_floor(const FloorShape& shape, const void* data, void* out, void* workspace, cudaStream_t stream);

/// Keeps the device busy for so long: what is enqueued meanwhile then runs without waiting for the host.
void run_hold(std::int64_t nanoseconds, cudaStream_t stream);

}  // namespace kvonce::bench::cuda
