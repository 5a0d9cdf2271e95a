// What one worker is handed: plain values, resolved by run.cpp, executed by the code compiled for one target.
#pragma once

#include <cmath>
#include <cstdint>

#include "kvonce/types.hpp"
#include "shared/token_range.h"

namespace kvonce::cpu {

constexpr std::int64_t kPadFloats = 32;  // scratch and partial rows are padded to whole pairs of the widest vectors
constexpr int kMaxRowTile = 8;
constexpr int kQueryCopies = 2;               // room in the scratch for rows of q stored twice (attend_split.hpp)
constexpr std::int64_t kMostDimsTwice = 256;  // of such rows
constexpr std::int64_t kMaxStepTokens = 1024;
constexpr int kMaxHeadsPerStep = 8;

constexpr int kMaxStepsPerTurn = 4;
constexpr std::int64_t kPartsDims = 128;  // of rows whose steps are read in parts

static constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Rows of a tile rounded up to a power of two, which divides every vector: how scores are laid out.
static constexpr int lane_rows(int rows) { return rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8; }

/// The lanes behind the last token of a vector score -inf.
static inline void hide_padding(float* scores, std::int64_t count, std::int64_t width) {
  for (std::int64_t i = count; i < round_up(count, width); ++i) scores[i] = -INFINITY;
}

/// What changes the scores of one KV stream besides scale. Query heads are counted within the group.
struct ScoreRules {
  float softcap_log2e;        // > 0: softcap * log2(e)
  const float* alibi_slopes;  // [group_size] or null
  MaskKind mask;
  DType mask_dtype;             // of an additive mask
  const void* mask_entries;     // of query token 0, the group's first head, key mask_first_key; strides in elements
  std::int64_t mask_first_key;  // keys before it are not masked: those before a tree's
  std::int64_t mask_row_stride;
  std::int64_t mask_head_stride;
  std::int64_t mask_token_stride;
  const float* mask_slopes;  // [group_size] or null, times an additive mask
};

/// The scales or the biases of one KV stream, [kv_len][head_dim / quant_group].
struct SideRows {
  const void* data;  // of token 0
  std::int64_t token_stride;
};

/// Rows [row_begin, row_begin + num_rows) of one KV stream over one token chunk.
/// Row r is query token r / group_size of the group's query head r % group_size.
struct ChunkTask {
  const void* q;  // query token 0 of the group's first head; [q_len][group_size][head_dim_qk] by the strides
  std::int64_t q_token_stride;
  std::int64_t q_head_stride;
  DType q_dtype;
  std::int64_t q_len;
  std::int64_t group_size;
  std::int64_t row_begin;
  std::int64_t num_rows;
  float scale_log2e;  // scores are kept in base 2

  const void* k;  // token 0 of the stream, [kv_len][head_dim_qk]; strides in elements, of MLX's codes in bytes
  const void* v;  // token 0 of the stream, [kv_len][head_dim_v]
  std::int64_t k_token_stride;
  std::int64_t v_token_stride;
  KvFormat k_format;
  KvFormat v_format;
  std::int64_t head_dim_qk;
  std::int64_t head_dim_v;
  std::int64_t quant_group;  // of the MLX formats, as are the next five
  DType scales_dtype;
  SideRows k_scales;
  SideRows k_biases;
  SideRows v_scales;
  SideRows v_biases;
  shared::TokenRange chunk;
  std::int64_t kv_len;
  std::int64_t kv_start;
  std::int64_t window;
  bool causal;
  ScoreRules rules;

  // What prefetches ask for: of every token fetch_bytes from k_fetch, v_fetch on, which are token 0 of the first head that
  // this worker takes step by step with this one. Of num_fetchers such tasks each asks for an equal part of a step's tokens.
  const void* k_fetch;
  const void* v_fetch;
  std::int64_t k_fetch_bytes;
  std::int64_t v_fetch_bytes;
  std::int64_t fetcher_idx;
  std::int64_t num_fetchers;
  bool starts_cold;  // no earlier task of the worker has asked for the first step's keys

  bool pair_dot;         // bf16 q and K on a target with dot_pairs: score_tokens_dot
  bool pair_dot_values;  // bf16 V as well: accumulate_values_dot
  std::int64_t row_tile;
  std::int64_t step_tokens;
  bool reads_parts;             // a step's quarters side by side, by a stream's only row (attend_in_order.hpp)
  std::int64_t steps_per_turn;  // whose keys are scored before their values are added up
  std::int64_t prefetch_tokens;
  std::int64_t prefetch_lines;  // one request per so many cache lines
  std::int64_t prefetch_level;  // 1: four pages side by side into L1, 2: in address order into L2
  float* scratch;               // scratch_floats() floats, 64-byte aligned, private to the worker

  float* partial_o;    // [rows of the stream][round_up(head_dim_v, kPadFloats)] of this chunk
  float* partial_lse;  // [rows of the stream]
};

/// All chunks of rows [row_begin, row_begin + num_rows) of one KV stream, joined in chunk order into the caller's out.
struct MergeTask {
  const float* partial_o;  // [chunk][rows_per_stream][padded head_dim_v]
  float* partial_lse;      // [chunk][rows_per_stream]; overwritten with the chunks' weights
  std::int64_t num_chunks;
  std::int64_t rows_per_stream;
  std::int64_t row_begin;
  std::int64_t num_rows;
  std::int64_t group_size;
  std::int64_t head_dim_v;
  const float* sinks;  // [group_size] or null
  void* out;           // query token 0 of the group's first head
  std::int64_t out_token_stride;
  std::int64_t out_head_stride;
  DType out_dtype;
  float* lse;  // same position, or null
  std::int64_t lse_token_stride;
  std::int64_t lse_head_stride;
};

/// Scales of a row: none but of MLX's formats.
static constexpr std::int64_t num_groups(KvFormat format, std::int64_t dims, std::int64_t quant_group) {
  return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4 ? dims / quant_group : 0;
}

/// A token step's scales and biases in float32, num_groups of each per token: room for whole vectors at the end of both.
static constexpr std::int64_t affine_step_floats(std::int64_t num_groups, std::int64_t step_tokens) {
  return num_groups == 0 ? 0 : 2 * (round_up(num_groups * step_tokens, kPadFloats) + kPadFloats);
}

/// Worker scratch: packed q, o, scores, running maximum and sum of every row tile, which rows see which of a step's keys, the
/// bias of one tile, and scales and biases of K's and V's groups, none where they have none.
static constexpr std::int64_t scratch_floats(std::int64_t rows, std::int64_t head_dim_qk, std::int64_t head_dim_v,
                                             std::int64_t step_tokens, std::int64_t steps_per_turn,
                                             std::int64_t k_groups, std::int64_t v_groups) {
  // A tile's scores take the row count rounded up to a power of two per token: less than twice the rows.
  return rows * (kQueryCopies * round_up(head_dim_qk, kPadFloats) + round_up(head_dim_v, kPadFloats) +
                 steps_per_turn * (2 * step_tokens + (step_tokens + 1 + 3) / 4) + 2 * kPadFloats) +
         kMaxRowTile * step_tokens + kPadFloats + affine_step_floats(k_groups, step_tokens) +
         affine_step_floats(v_groups, step_tokens);
}

/// One instruction set's code.
struct Target {
  const char* name;
  int vector_floats;
  int max_row_tile;
  bool has_pair_dot;
  int one_pass_dims;  // of V that one row adds up in one pass
  /// 1 to kMaxHeadsPerStep tasks, a step of each in turn: heads of one token chunk whose rows lie side by side.
  void (*attend_chunk)(const ChunkTask* tasks, int num_tasks);
  void (*merge_rows)(const MergeTask& task);
};

}  // namespace kvonce::cpu
