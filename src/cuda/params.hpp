// What a launch is told: plain values that the host fills and every kernel reads.
#pragma once

#include <cstdint>

#include "shared/function.h"

struct float2;  // CUDA's

namespace kvonce::cuda {

/// A tensor whose element [seq][head][token][dim] stands at data + seq*seq + head*head + token*token + dim (elements).
struct Strided {
  const void* data;
  std::int64_t token;
  std::int64_t head;
  std::int64_t seq;
};

/// The same for rows that start at multiples of 16 bytes, where the strides fit: few instructions find a row.
struct Rows {
  const char* data;
  std::int32_t token;  // bytes
  std::int32_t head;   // 16 bytes
  std::int32_t seq;    // 16 bytes
};

/// Element types by number, the order of DType and of KvFormat's first three.
enum Element : std::int32_t { kF32 = 0, kF16 = 1, kBf16 = 2 };

/// How the blocks of one KV stream join their partials.
enum Join : std::int32_t {
  kJoinWorkspace = 0,  // partials to the workspace; the blocks that started last wait for them and join slices
  kJoinCluster = 1,    // the blocks are one cluster and push slices into each other's shared memory
  kJoinFew = 2,        // as kJoinWorkspace, where up to kFewSplits splits leave several slices to a block
};

/// A word, in the workspace or in a cluster's mailboxes, that holds no partial yet. No partial ever contains it:
/// without_empty_word() replaces it.
constexpr std::uint32_t kEmptyWord = 0xffffffffU;

/// First word of a prepared workspace.
constexpr std::uint32_t kPreparedWord = 0x6b766f31U;

/// Words of the workspace's header: [0] kPreparedWord, [1] set when a kv_len had to be clamped.
constexpr std::int32_t kHeaderWords = 64;

/// How a problem is laid over blocks: decided by make_plan, the same in every call.
struct LaunchShape {
  std::int32_t rows_per_block = 0;  // rows that share a block's pass over K and V
  std::int32_t row_blocks = 0;      // ceil(rows / rows_per_block)
  std::int32_t num_splits = 0;      // blocks per KV stream
  std::uint32_t splits_magic = 0;   // divides by num_splits: divide()
  std::int32_t split_tokens = 0;    // > 0: every split but the last owns exactly so many; 0: the length in equal shares
  std::int32_t join_blocks = 1;     // blocks that join the partials of a stream
  std::int32_t place_rows = 0;      // rows that a split's place in the workspace has room for
  std::int32_t slice_rows = 1;      // rows that a slice of kSlice elements can touch
  std::int32_t own_slices = 1;      // slices that a block of a cluster joins at most
  Join join = kJoinWorkspace;
};

/// Constant memory is cold when a kernel starts and comes in lines: what the first loads of K and V need stands in front.
struct AttendParams {
  Rows k_rows;                  // [num_seqs, num_kv_heads, kv_len, head_dim_qk], of the tensor-core kernel
  Rows v_rows;                  // [num_seqs, num_kv_heads, kv_len, head_dim_v]
  const std::int32_t* kv_lens;  // [num_seqs] or null: max_kv_len
  std::int32_t share_tiles;     // >= 0: every length is max_kv_len, every row sees all of it, and a split takes so many
  std::int32_t share_rest;      // tiles, the first share_rest splits one more; -1: find out
  std::int32_t share_splits;    // splits that have tiles then
  std::int32_t max_kv_len;
  std::int32_t num_kv_heads;
  std::int32_t seq_begin;  // of this launch
  std::int32_t q_len;
  bool causal;
  bool earlier_kv_ready;  // K and V of tokens before kv_len - q_len were there before the preceding kernel
  bool vector_kv;         // generic kernel: K and V may be loaded four elements at a time
  bool vector_out;        // out may be stored four elements at a time

  Rows q_rows;  // [num_seqs, num_q_heads, q_len, head_dim_qk]
  LaunchShape shape;
  const std::int32_t* kv_starts;  // [num_seqs] or null: 0
  std::int32_t rows;              // group_size * q_len
  std::int32_t window;            // 0: none
  std::int32_t group_size;
  float scale_log2;  // scale * log2(e)
  std::int32_t head_dim_qk;
  std::int32_t head_dim_v;
  Element q_type;
  Element k_type;
  Element v_type;
  Element out_type;

  Strided q;  // of the generic kernel
  Strided k;
  Strided v;

  std::uint32_t* header;   // kHeaderWords words
  std::uint64_t* tickets;  // [num_streams]: which blocks of a stream have started (kMaxJoiners)
  float* partial_o;        // [num_streams, num_splits, place_rows * head_dim_v]
  float2* partial_ml;      // [num_streams, slices, num_splits, slice_rows]: running maximum (log2) and sum
  const float* sinks;      // [num_q_heads] or null
  void* out;
  std::int64_t out_seq;
  std::int64_t out_head;
  std::int64_t out_token;
  float* lse;  // may be null
  std::int64_t lse_seq;
  std::int64_t lse_head;
  std::int64_t lse_token;
  std::uint32_t q_len_magic;  // divides by q_len: divide()
};

/// Rows that plain decode (Known in partial.cuh) takes at most, and has room for in shared memory.
constexpr std::int32_t kPlainRows = 8;

/// Token tiles that a block takes at least before another one is used: one for each of its warps. H200, 32q/4kv d128, 2,048
/// tokens through the workspace: 6.3 us with 8, 6.8 us with 4.
constexpr std::int32_t kMinTiles = 8;

/// H200, 32q/8kv d128, 8 sequences of 4,096 tokens (2 splits): 34.7 us with kJoinFew, 37.0 us slice by slice; where a block has
/// one slice the other way is the faster one (32q/32kv, 2,048 tokens: 12.0 and 12.3 us).
constexpr std::int32_t kFewSplits = 4;

/// Elements (of four dims) of a slice of the output, which one block joins.
constexpr std::int32_t kSlice = 16;
/// A stream's word in the workspace: its low half counts the blocks that have started, the high half has a bit for each joining block
/// that left before all had.
constexpr std::int32_t kMaxJoiners = 32;
KVONCE_FN constexpr std::int32_t slices_of(std::int32_t elements) { return (elements + kSlice - 1) / kSlice; }

/// From one staged row of K or V to the next (KvTile), with pieces of 16 bytes between them, so that the eight lanes whose
/// loads go together read from different banks: of K, (g, t) four pieces of two rows; of V two pieces of four.
constexpr int kKeyPitch = 4;    // pieces, modulo 8
constexpr int kValuePitch = 1;  // of every second row
KVONCE_FN constexpr int stage_row_bytes(int head_dim, int pitch) {
  return 16 * (head_dim / 8 + (pitch + 8 - head_dim / 8 % 8) % 8);
}
/// Bytes of a warp's staged step.
KVONCE_FN constexpr int stage_bytes(int head_dim_qk, int head_dim_v, int token_tiles) {
  return token_tiles * 16 * (stage_row_bytes(head_dim_qk, kKeyPitch) + stage_row_bytes(head_dim_v, kValuePitch));
}

/// Groups of four warps (attend_warpgroup.cuh): tokens of a group's step, steps of a group whose K and V have places in shared memory.
constexpr int kGroupStages = 2;
KVONCE_FN constexpr int group_tokens(int head_dim) { return head_dim <= 64 ? 128 : 64; }
/// Bytes of a block's q and of its two groups' stages, from a multiple of 1024 on.
KVONCE_FN constexpr int group_bytes(int head_dim, int rows) {
  return 1024 + 2 * head_dim * (rows + 2 * kGroupStages * 2 * group_tokens(head_dim));
}

/// n / divisor for 0 <= n < 2^31, with magic = divide_magic(divisor).
KVONCE_FN std::uint32_t divide_magic(std::int32_t divisor) {
  return divisor == 1 ? 0 : static_cast<std::uint32_t>((1ULL << 32) / static_cast<std::uint64_t>(divisor) + 1);
}

// Shared memory of a block, in order: the warps' partials, their maxima and sums, and in a cluster what the other blocks
// send. Sizes are multiples of 16 bytes.
// At least what join_workspace() needs for its sums: 6 floats for every warp and element of two slices, and one to spare.
// Where K and V are staged (KvTile), they have the same place before.
KVONCE_FN constexpr int merge_x_floats(int num_warps, int rows, int dim_v, int kv_bytes) {
  const int sums = 6 * num_warps * (2 * kSlice + 1);
  const int floats = num_warps * rows * dim_v > sums ? num_warps * rows * dim_v : sums;
  return floats > kv_bytes / 4 ? floats : kv_bytes / 4;
}
KVONCE_FN constexpr int merge_ml_pairs(int num_warps, int rows) { return (num_warps * rows + 1) / 2 * 2; }
KVONCE_FN constexpr int merge_shared_bytes(const LaunchShape& shape, int num_warps, int rows, int dim_v, int kv_bytes) {
  const int bytes = 4 * merge_x_floats(num_warps, rows, dim_v, kv_bytes) + 8 * merge_ml_pairs(num_warps, rows);
  const int mail = shape.own_slices * shape.num_splits * (16 * kSlice + 8 * shape.slice_rows);
  return shape.join == kJoinCluster ? bytes + (mail + 15) / 16 * 16 : bytes;
}

}  // namespace kvonce::cuda
