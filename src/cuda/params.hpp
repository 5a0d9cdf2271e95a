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

/// Constant memory is cold when a kernel starts and comes in lines: what the first loads of K and V need stands in front.
struct AttendParams {
  Strided k;                      // [num_seqs, num_kv_heads, kv_len, head_dim_qk]
  Strided v;                      // [num_seqs, num_kv_heads, kv_len, head_dim_v]
  const std::int32_t* kv_lens;    // [num_seqs] or null: max_kv_len
  const std::int32_t* kv_starts;  // [num_seqs] or null: 0
  std::int32_t max_kv_len;
  std::int32_t num_kv_heads;
  std::int32_t rows;            // group_size * q_len
  std::int32_t rows_per_block;  // rows that share a block's pass over K and V
  std::int32_t row_blocks;      // ceil(rows / rows_per_block)
  std::int32_t window;          // 0: none
  std::int32_t q_len;
  std::int32_t seq_begin;      // of this launch
  std::int32_t num_splits;     // blocks per KV stream
  std::uint32_t splits_magic;  // divides by num_splits: divide()
  std::int32_t share_tiles;    // >= 0: every length is max_kv_len, every row sees all of it, and a split takes so many
  std::int32_t share_rest;     // tiles, the first share_rest splits one more; -1: find out
  std::int32_t share_splits;   // splits that have tiles then
  std::int32_t split_tokens;   // > 0: every split but the last owns exactly so many; 0: the length in equal shares
  Join join;
  bool causal;
  bool earlier_kv_ready;  // K and V of tokens before kv_len - q_len were there before the preceding kernel
  bool vector_kv;         // generic kernel: K and V may be loaded four elements at a time
  bool vector_out;        // out may be stored four elements at a time

  Strided q;  // [num_seqs, num_q_heads, q_len, head_dim_qk]
  std::int32_t group_size;
  float scale_log2;  // scale * log2(e)
  std::int32_t head_dim_qk;
  std::int32_t head_dim_v;
  Element q_type;
  Element k_type;
  Element v_type;
  Element out_type;

  std::uint32_t* header;     // kHeaderWords words
  std::uint32_t* tickets;    // [num_streams]: blocks of a stream that have started
  float* partial_o;          // [num_streams, num_splits, tile rows * head_dim_v]
  float2* partial_ml;        // [num_streams, join_blocks, num_splits, slice_rows]: running maximum (log2) and sum
  std::int32_t join_blocks;  // blocks that join the partials of a stream, a slice of the output each
  std::int32_t slice_log2;   // elements of a slice when all of them join
  std::int32_t slice_rows;   // rows that a slice can touch
  const float* sinks;        // [num_q_heads] or null
  void* out;
  std::int64_t out_seq;
  std::int64_t out_head;
  std::int64_t out_token;
  float* lse;  // may be null
  std::int64_t lse_seq;
  std::int64_t lse_head;
  std::int64_t lse_token;
};

/// Token tiles that a block takes at least before another one is used: one for each of its warps. H200, 32q/4kv d128, 2,048
/// tokens through the workspace: 6.3 us with 8, 6.8 us with 4.
constexpr std::int32_t kMinTiles = 8;

/// Elements (of four dims) of a slice of the output that one block joins at a time.
constexpr std::int32_t kSlice = 16;

/// n / divisor for 0 <= n < 2^31, with magic = divide_magic(divisor).
KVONCE_FN std::uint32_t divide_magic(std::int32_t divisor) {
  return divisor == 1 ? 0 : static_cast<std::uint32_t>((1ULL << 32) / static_cast<std::uint64_t>(divisor) + 1);
}

// Shared memory of a block, in order: the warps' partials, their maxima and sums, and in a cluster what the other blocks
// send. Sizes are multiples of 16 bytes.
// At least what join_workspace() needs for its sums: 6 floats for every warp and element of a slice, and one to spare.
KVONCE_FN constexpr int merge_x_floats(int num_warps, int rows, int dim_v) {
  const int sums = 6 * num_warps * (kSlice + 1);
  return num_warps * rows * dim_v > sums ? num_warps * rows * dim_v : sums;
}
KVONCE_FN constexpr int merge_ml_pairs(int num_warps, int rows) { return (num_warps * rows + 1) / 2 * 2; }
KVONCE_FN constexpr int received_elements(const AttendParams& p) {
  return p.join == kJoinCluster ? p.num_splits << p.slice_log2 : 0;
}
KVONCE_FN constexpr int merge_shared_bytes(const AttendParams& p, int num_warps, int dim_v) {
  return 4 * merge_x_floats(num_warps, p.rows_per_block, dim_v) + 8 * merge_ml_pairs(num_warps, p.rows_per_block) +
         24 * received_elements(p);
}

}  // namespace kvonce::cuda
