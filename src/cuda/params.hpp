// What a launch is told: plain values that the host fills and every kernel reads.
#pragma once

#include <cstdint>

#include "shared/function.h"

struct float2;  // CUDA's

namespace kvonce::cuda {

/// A tensor whose element [seq][head][token][dim] stands at data + seq*seq + head*head + token*token + dim (elements).
struct Strided {
  const void* data;
  std::int64_t seq;
  std::int64_t head;
  std::int64_t token;
};

/// Element types by number, the order of DType and of KvFormat's first three.
enum Element : std::int32_t { kF32 = 0, kF16 = 1, kBf16 = 2 };

/// How the blocks of one KV stream join their partials.
enum Join : std::int32_t {
  kJoinWorkspace = 0,  // partials to the workspace; the blocks that started last wait for them and join a slice each
  kJoinCluster = 1,    // the blocks are one cluster and push partials into each other's shared memory
};

/// A word of the workspace that holds no partial yet. No partial ever contains it: store_words() replaces it.
constexpr std::uint32_t kEmptyWord = 0xffffffffU;

/// First word of a prepared workspace.
constexpr std::uint32_t kPreparedWord = 0x6b766f31U;

/// Words of the workspace's header: [0] kPreparedWord, [1] set when a kv_len had to be clamped.
constexpr std::int32_t kHeaderWords = 64;

struct AttendParams {
  Strided q;  // [num_seqs, num_q_heads, q_len, head_dim_qk]
  Strided k;  // [num_seqs, num_kv_heads, kv_len, head_dim_qk]
  Strided v;  // [num_seqs, num_kv_heads, kv_len, head_dim_v]

  void* out;
  std::int64_t out_seq;
  std::int64_t out_head;
  std::int64_t out_token;
  float* lse;  // may be null
  std::int64_t lse_seq;
  std::int64_t lse_head;
  std::int64_t lse_token;

  const std::int32_t* kv_lens;    // [num_seqs] or null: max_kv_len
  const std::int32_t* kv_starts;  // [num_seqs] or null: 0
  const float* sinks;             // [num_q_heads] or null

  std::uint32_t* header;   // kHeaderWords words
  std::uint32_t* tickets;  // [num_streams]: blocks of a stream that have started
  float* partial_o;        // [num_streams, num_splits, tile rows * head_dim_v]
  float2* partial_ml;      // [num_streams, join_blocks, num_splits, slice_rows]: running maximum (log2) and sum

  float scale_log2;  // scale * log2(e)
  std::int32_t max_kv_len;
  std::int32_t q_len;
  std::int32_t group_size;
  std::int32_t num_kv_heads;
  std::int32_t head_dim_qk;
  std::int32_t head_dim_v;
  std::int32_t rows;            // group_size * q_len
  std::int32_t rows_per_block;  // rows that share a block's pass over K and V
  std::int32_t row_blocks;      // ceil(rows / rows_per_block)
  std::int32_t window;          // 0: none
  std::int32_t seq_begin;       // of this launch
  std::int32_t num_splits;      // blocks per KV stream
  std::int32_t split_tokens;    // > 0: every split but the last owns exactly so many; 0: the length in equal shares
  std::int32_t min_tiles;       // token tiles that a block takes at least before another one is used
  std::int32_t join_blocks;     // blocks that join the partials of a stream, a slice of the output each
  std::int32_t slice_rows;      // rows that a slice can touch
  Element q_type;
  Element k_type;
  Element v_type;
  Element out_type;
  Join join;
  bool causal;
  bool earlier_kv_ready;  // K and V of tokens before kv_len - q_len were there before the preceding kernel
  bool vector_kv;         // generic kernel: K and V may be loaded four elements at a time
  bool vector_out;        // out may be stored four elements at a time
};

// Shared memory of a block, in order: the warps' partials (later one element per thread), their maxima and sums, and in a
// cluster what the other blocks send.
KVONCE_FN constexpr int merge_x_floats(int num_warps, int rows, int dim_v, int threads) {
  return num_warps * rows * dim_v > 4 * threads ? num_warps * rows * dim_v : 4 * threads;
}
KVONCE_FN constexpr int merge_ml_pairs(int num_warps, int rows, int threads) {
  const int pairs = num_warps * rows > threads ? num_warps * rows : threads;
  return (pairs + 1) / 2 * 2;  // what follows is 16-byte aligned
}
KVONCE_FN constexpr int received_elements(const AttendParams& p, int rows, int dim_v) {
  const int slice = (rows * dim_v / 4 + p.num_splits - 1) / p.num_splits;
  return p.join == kJoinCluster ? slice * p.num_splits : 0;
}
KVONCE_FN constexpr int merge_shared_bytes(const AttendParams& p, int num_warps, int dim_v) {
  const int threads = num_warps * 32;
  return 4 * merge_x_floats(num_warps, p.rows_per_block, dim_v, threads) +
         8 * merge_ml_pairs(num_warps, p.rows_per_block, threads) + 24 * received_elements(p, p.rows_per_block, dim_v);
}

}  // namespace kvonce::cuda
