// The neighbours of a chain as C functions, so that a script gives every peer the chain that `kvonce bench --chain` gives
// kvonce. form: 0 plain, 1 late, 2 early, see neighbours.hpp. Pointers are device memory; cuda_stream is a cudaStream_t.
// Both enqueue and return a cudaError_t; cudaErrorInvalidValue (1) also for an unknown form or what is no multiple of 4 bytes.
#include "baselines/cuda/neighbours.hpp"

#define KVONCE_PEER extern "C" __attribute__((visibility("default")))

namespace {

using kvonce::bench::cuda::NeighbourForm;
using kvonce::bench::cuda::NeighbourRows;

bool is_form(int form) { return form >= 0 && form <= 2; }

NeighbourRows rows(void* to, const void* from, std::size_t row_bytes, long long head_stride, int num_heads) {
  NeighbourRows rows;
  rows.to = to;
  rows.from = from;
  rows.row_bytes = static_cast<std::int64_t>(row_bytes);
  rows.head_stride = head_stride;
  rows.num_heads = num_heads;
  return rows;
}

}  // namespace

// q_bytes from q_from to q, and from k_from to k_row and v_from to v_row [num_kv_heads] rows of row_bytes each, packed in
// the places that are read. consumed: kvonce_bench_consumed_floats() floats, zero before the first call.
KVONCE_PEER int kvonce_bench_produce(int form, void* q, const void* q_from, std::size_t q_bytes, void* k_row,
                                     const void* k_from, void* v_row, const void* v_from, std::size_t row_bytes,
                                     long long k_head_stride_bytes, long long v_head_stride_bytes, int num_kv_heads,
                                     const float* consumed, void* cuda_stream) {
  if (!is_form(form)) return cudaErrorInvalidValue;
  kvonce::bench::cuda::Produced produced;
  produced.q = rows(q, q_from, q_bytes, 0, 1);
  produced.k = rows(k_row, k_from, row_bytes, k_head_stride_bytes, num_kv_heads);
  produced.v = rows(v_row, v_from, row_bytes, v_head_stride_bytes, num_kv_heads);
  return run_produce(static_cast<NeighbourForm>(form), produced, consumed, static_cast<cudaStream_t>(cuda_stream));
}

// Reads out_bytes of out and writes every float of consumed.
KVONCE_PEER int kvonce_bench_consume(int form, const void* out, std::size_t out_bytes, float* consumed,
                                     void* cuda_stream) {
  if (!is_form(form)) return cudaErrorInvalidValue;
  return run_consume(static_cast<NeighbourForm>(form), out, out_bytes, consumed,
                     static_cast<cudaStream_t>(cuda_stream));
}

KVONCE_PEER int kvonce_bench_consumed_floats() { return static_cast<int>(kvonce::bench::cuda::kConsumedFloats); }
