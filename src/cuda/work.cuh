// Which rows and which tokens a block owns.
#pragma once

#include "cuda/params.hpp"
#include "shared/token_range.h"

namespace kvonce::cuda {

constexpr int kTileTokens = 16;  // the M dimension of the tensor cores' instruction: a warp's token step

/// One block's share. Blocks are numbered [seq][kv_head][row_block][split].
struct BlockWork {
  int seq;
  int kv_head;
  int row_begin;  // first of num_rows rows of the KV stream
  int num_rows;
  int split;            // of num_splits
  int num_splits;       // that have tokens at this length; 1 when there are none at all
  std::int64_t stream;  // (seq, kv_head, row_block)
  int kv_len;
  int kv_start;
  int begin;  // tokens that some row sees: [begin, end)
  int end;
  int tile_begin;  // this block's tiles of kTileTokens, from `begin` on
  int tile_end;
  const char* k;  // with kEarlyRows: the KV head's first row of K and of V
  const char* v;
};

__device__ __forceinline__ int divide(int n, int divisor, std::uint32_t magic) {
  if (divisor == 1) return n;
  const int quotient = static_cast<int>(__umulhi(static_cast<std::uint32_t>(n), magic));  // at most one too large
  return quotient * static_cast<std::int64_t>(divisor) > n ? quotient - 1 : quotient;
}

__device__ __forceinline__ void find_kv(const AttendParams& p, BlockWork& w) {
  const auto first = [&w](const Rows& rows) {
    return rows.data +
           16 * (static_cast<std::int64_t>(w.seq) * rows.seq + static_cast<std::int64_t>(w.kv_head) * rows.head);
  };
  w.k = first(p.k_rows);
  w.v = first(p.v_rows);
}

// Lengths from memory, ranges from the mask.
template <Join kJoin, bool kPlain, bool kEarlyRows>
__device__ __forceinline__ void find_range(const AttendParams& p, BlockWork& w) {
  if constexpr (kEarlyRows) {
    // No branches up to the first use: what follows the load is not held back by it.
    int length = w.kv_len;
    asm volatile(
        "{\n\t"
        ".reg .pred has;\n\t"
        "setp.ne.u64 has, %1, 0;\n\t"
        "@has ld.global.s32 %0, [%2];\n\t"
        "}"
        : "+r"(length)
        : "l"(p.kv_lens), "l"(p.kv_lens + w.seq));
    // Worked out while the length is on its way: code that runs once is slow.
    find_kv(p, w);
    asm volatile("" ::"l"(w.k), "l"(w.v), "r"(threadIdx.x), "r"(p.shape.num_splits), "r"(p.shape.splits_magic),
                 "r"(p.k_rows.token), "r"(p.v_rows.token));
    w.kv_len = min(max(length, 0), p.max_kv_len);
    w.end = w.kv_len;
    asm volatile(
        "{\n\t"
        ".reg .pred bad;\n\t"
        "setp.ne.s32 bad, %0, 0;\n\t"
        "@bad st.global.u32 [%1], 1;\n\t"
        "}" ::"r"(length != w.kv_len && threadIdx.x == 0 ? 1 : 0),
        "l"(p.header + 1)
        : "memory");
  } else if (p.kv_lens != nullptr) {
    w.kv_len = p.kv_lens[w.seq];
    if (w.kv_len < 0 || w.kv_len > p.max_kv_len) {
      w.kv_len = w.kv_len < 0 ? 0 : p.max_kv_len;
      if (threadIdx.x == 0) p.header[1] = 1;
    }
    w.end = w.kv_len;
  }
  if constexpr (!kPlain) {
    if (p.kv_starts != nullptr) w.kv_start = min(max(p.kv_starts[w.seq], 0), w.kv_len);
  }
  // The oldest row sees the earliest keys, the newest row the latest.
  w.begin = w.kv_start;
  if (!kPlain && p.window > 0) {
    w.begin = static_cast<int>(shared::visible_range(0, p.q_len, w.kv_len, w.kv_start, p.causal, p.window).begin);
    w.begin = min(w.begin, w.kv_len);
  }

  const int tiles = (w.end - w.begin + kTileTokens - 1) / kTileTokens;
  if (!kPlain && p.shape.split_tokens > 0) {
    const int split_tiles = p.shape.split_tokens / kTileTokens;
    w.num_splits = max(1, (tiles + split_tiles - 1) / split_tiles);
    w.tile_begin = min(tiles, w.split * split_tiles);
    w.tile_end = min(tiles, w.tile_begin + split_tiles);
    return;
  }
  // A short range takes fewer blocks; a cluster always takes all of its own.
  w.num_splits = p.shape.num_splits;
  const int share = divide(tiles, p.shape.num_splits, p.shape.splits_magic);
  if (share < kMinTiles && kJoin != kJoinCluster) {
    w.num_splits = max(1, (tiles + kMinTiles - 1) / kMinTiles);
    w.tile_begin = min(tiles, w.split * kMinTiles);
    w.tile_end = min(tiles, w.tile_begin + kMinTiles);
    return;
  }
  const int rest = tiles - share * w.num_splits;
  w.tile_begin = w.split * share + min(w.split, rest);
  w.tile_end = w.tile_begin + share + (w.split < rest ? 1 : 0);
}

/// kPlain: Known in partial.cuh. kEarlyRows: with w.k and w.v, worked out while a length in memory is on its way.
template <Join kJoin, bool kPlain, bool kEarlyRows = false>
__device__ __forceinline__ BlockWork find_work(const AttendParams& p) {
  BlockWork w;
  w.seq = p.seq_begin + static_cast<int>(blockIdx.z);
  w.split = static_cast<int>(blockIdx.x);
  w.kv_head = static_cast<int>(blockIdx.y);
  w.row_begin = 0;
  w.num_rows = p.rows;
  w.stream = static_cast<std::int64_t>(w.seq) * p.num_kv_heads + w.kv_head;
  if (!kPlain && p.shape.row_blocks > 1) {
    const int row_block = static_cast<int>(blockIdx.y) % p.shape.row_blocks;
    w.kv_head = static_cast<int>(blockIdx.y) / p.shape.row_blocks;
    w.row_begin = row_block * p.shape.rows_per_block;
    w.num_rows = min(p.shape.rows_per_block, p.rows - w.row_begin);
    w.stream = (static_cast<std::int64_t>(w.seq) * p.num_kv_heads + w.kv_head) * p.shape.row_blocks + row_block;
  }
  w.kv_len = p.max_kv_len;
  w.kv_start = 0;
  w.begin = 0;
  w.end = w.kv_len;
  if (p.share_tiles >= 0) {
    if constexpr (kEarlyRows) find_kv(p, w);
    w.num_splits = p.share_splits;
    w.tile_begin = w.split * p.share_tiles + min(w.split, p.share_rest);
    w.tile_end = w.tile_begin + p.share_tiles + (w.split < p.share_rest ? 1 : 0);
  } else {
    find_range<kJoin, kPlain, kEarlyRows>(p, w);
  }
  return w;
}

/// Brings the rest of the parameters near: under load, their first use at the end would wait for memory.
__device__ __forceinline__ void touch_params(const AttendParams& p) {
  asm volatile("" ::"l"(p.q_rows.data), "r"(p.head_dim_qk), "l"(p.tickets), "l"(p.out), "l"(p.lse_seq),
               "l"(p.lse_token));
}

/// The query head and query token of a row of the KV stream.
struct RowPlace {
  int head;
  int query;
};
template <bool kPlain>
__device__ __forceinline__ RowPlace place_of(const AttendParams& p, const BlockWork& w, int row) {
  if constexpr (kPlain) return {w.kv_head * p.group_size + row, 0};
  row += w.row_begin;
  if (p.q_len == 1) return {w.kv_head * p.group_size + row, 0};
  const int head = divide(row, p.q_len, p.q_len_magic);
  return {w.kv_head * p.group_size + head, row - head * p.q_len};
}

/// The tokens that a row sees.
struct RowRange {
  int begin;
  int end;
};
__device__ __forceinline__ RowRange range_of(const AttendParams& p, const BlockWork& w, int row) {
  const int stream_row = w.row_begin + row;
  const int query = p.q_len == 1 ? 0 : stream_row - divide(stream_row, p.q_len, p.q_len_magic) * p.q_len;
  const auto range = shared::visible_range(query, p.q_len, w.kv_len, w.kv_start, p.causal, p.window);
  return {static_cast<int>(range.begin), static_cast<int>(range.end)};
}

}  // namespace kvonce::cuda
