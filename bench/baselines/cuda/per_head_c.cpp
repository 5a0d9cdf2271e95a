// per_head.cu as C functions for scripts. Pointers are device memory, strides are in elements; q, K, V and out are of one
// dtype. Calls enqueue on cuda_stream, a cudaStream_t, allocate nothing and may be captured in a graph.
#include <exception>
#include <string>

#include "baselines/cuda/kernels.hpp"

#define KVONCE_PEER extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_error;

kvonce::Problem problem(int dtype, int num_seqs, int num_q_heads, int num_kv_heads, int head_dim, int kv_len,
                        float scale) {
  kvonce::Problem problem;
  problem.num_seqs = num_seqs;
  problem.num_q_heads = num_q_heads;
  problem.num_kv_heads = num_kv_heads;
  problem.head_dim_qk = head_dim;
  problem.max_kv_len = kv_len;
  problem.q_dtype = problem.out_dtype = static_cast<kvonce::DType>(dtype);
  problem.k_format = problem.v_format = static_cast<kvonce::KvFormat>(dtype);
  problem.scale = scale;
  return problem;
}

}  // namespace

// Bytes at 256-byte alignment for calls with this many rows, num_seqs * num_q_heads.
KVONCE_PEER long long kvonce_bench_per_head_workspace_bytes(int num_rows, int head_dim) {
  const kvonce::Problem rows = problem(static_cast<int>(kvonce::DType::bf16), 1, num_rows, 1, head_dim, 1, 1.0F);
  return static_cast<long long>(kvonce::bench::cuda::PerHead(rows).workspace_bytes());
}

// One query token per sequence. dtype: 0 f32, 1 f16, 2 bf16. out: [num_seqs, num_q_heads, head_dim], packed. Returns 0, or 1
// and kvonce_bench_per_head_error() says why.
KVONCE_PEER int kvonce_bench_per_head(int dtype, int num_seqs, int num_q_heads, int num_kv_heads, int head_dim,
                                      int kv_len, float scale, const void* q, long long q_seq, long long q_head,
                                      const void* k, long long k_seq, long long k_head, long long k_token,
                                      const void* v, long long v_seq, long long v_head, long long v_token, void* out,
                                      void* workspace, void* cuda_stream) {
  try {
    kvonce::Inputs inputs;
    inputs.q = {q, q_seq, q_head, head_dim};
    inputs.k = {k, k_seq, k_head, k_token};
    inputs.v = {v, v_seq, v_head, v_token};
    kvonce::bench::cuda::PerHead(problem(dtype, num_seqs, num_q_heads, num_kv_heads, head_dim, kv_len, scale))
        .run(inputs, out, workspace, static_cast<cudaStream_t>(cuda_stream));
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

KVONCE_PEER const char* kvonce_bench_per_head_error() { return last_error.c_str(); }
