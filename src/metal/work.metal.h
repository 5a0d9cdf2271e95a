// What a simdgroup works on: buffers, rows, tokens, and the rules that turn a dot product into a score.
#pragma once

#include "metal/params.h"

namespace kvonce_metal {

/// What attend_* reads and writes, as params.h lists it. Strides are int64[4]: sequence, head, token (mask: row), dim (token).
template <typename T>
struct AttendBuffers {
  KV_DEVICE const T* q;
  KV_DEVICE const T* k;
  KV_DEVICE const T* v;
  KV_DEVICE const int* kv_lens;
  KV_DEVICE const int* kv_starts;
  KV_DEVICE const unsigned char* mask;
  KV_DEVICE const float* alibi_slopes;
  KV_DEVICE const int64_t* params;
  KV_DEVICE const float* scalars;
  KV_CONSTANT const int64_t* q_strides;
  KV_CONSTANT const int64_t* k_strides;
  KV_CONSTANT const int64_t* v_strides;
  KV_CONSTANT const int64_t* mask_strides;
  KV_DEVICE float* partial_o;
  KV_DEVICE float* partial_sums;
};

/// Where a thread stands: its threadgroup in the grid, its simdgroup in the threadgroup, its lane.
struct Place {
  int x;
  int y;
  int z;
  int simdgroup;
  int lane;
};

struct TokenRange {
  int begin;
  int end;
};

/// The share of one simdgroup. Rows are those of a KV stream (params.h).
struct Work {
  int seq;
  int kv_head;
  int num_rows;   // of the stream
  int row_begin;  // first row of this simdgroup's tile; at or past num_rows: a tile without rows
  int kv_len;
  int kv_start;
  int q_len;
  int causal;
  int window;
  int mask_kind;
  int has_alibi;
  bool rows_differ;    // some row may not see a token that another row of the tile sees
  TokenRange visible;  // of the row block
  TokenRange tokens;   // of this simdgroup
  float scale;
  float softcap;
};

/// A row's place in q and in the results.
struct RowPlace {
  int head;
  int query;
  int64_t result;  // index in [num_seqs, num_q_heads, q_len]
};

KV_FN int smaller_int(int a, int b) { return a < b ? a : b; }
KV_FN int larger_int(int a, int b) { return a > b ? a : b; }
KV_FN int clamp_int(int x, int low, int high) { return smaller_int(larger_int(x, low), high); }
KV_FN int param(KV_DEVICE const int64_t* params, Param name) { return int(params[name]); }

/// The tokens that query token `query` sees; begin <= end.
KV_FN TokenRange visible_tokens(KV_THREAD const Work& w, int query) {
  const int64_t position = int64_t(w.kv_len) - w.q_len + query;
  TokenRange range = {w.kv_start, w.kv_len};
  if (w.causal != 0 && position + 1 < range.end) range.end = int(position + 1);
  if (w.window > 0 && position - w.window + 1 > range.begin) range.begin = int(position - w.window + 1);
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

KV_FN int ceil_div(int a, int b) { return a / b + (a % b != 0 ? 1 : 0); }
KV_FN int round_up(int a, int unit) { return ceil_div(a, unit) * unit; }

/// Part `i` of `count` contiguous parts of `range`, each but the last a multiple of `unit` tokens.
KV_FN TokenRange part_of(TokenRange range, int i, int count, int unit) {
  const int tokens = range.end - range.begin;
  const int share = round_up(ceil_div(tokens, count), unit);
  const int64_t begin = range.begin + int64_t(i) * share;
  TokenRange part;
  part.begin = begin < range.end ? int(begin) : range.end;
  part.end = range.end - part.begin > share ? part.begin + share : range.end;
  return part;
}

/// Lengths, rows and rules; the visible tokens of `block_rows` rows from row_block * block_rows on.
template <typename T>
KV_FN Work find_rows(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Place& place, int block_rows) {
  Work w;
  const int num_kv_heads = param(b.params, kNumKvHeads);
  w.q_len = param(b.params, kQLen);
  w.num_rows = param(b.params, kNumQHeads) / num_kv_heads * w.q_len;
  const int row_blocks = ceil_div(w.num_rows, block_rows);
  w.seq = place.z;
  w.kv_head = place.y / row_blocks;
  w.row_begin = place.y % row_blocks * block_rows;
  w.kv_len = param(b.params, kKvLen);
  if (b.params[kHasKvLens] != 0) w.kv_len = clamp_int(b.kv_lens[w.seq], 0, w.kv_len);
  w.kv_start = b.params[kHasKvStarts] != 0 ? clamp_int(b.kv_starts[w.seq], 0, w.kv_len) : 0;
  w.causal = param(b.params, kCausal);
  w.window = param(b.params, kWindow);
  w.mask_kind = param(b.params, kMaskKind);
  w.has_alibi = param(b.params, kHasAlibi);
  w.rows_differ = w.mask_kind != kMaskNone || (w.q_len > 1 && (w.causal != 0 || w.window > 0));
  w.scale = b.scalars[kScale];
  w.softcap = b.scalars[kSoftcap];

  // Of the rows of the block the oldest query sees the earliest keys, the newest one the latest.
  const int last_row = smaller_int(w.row_begin + block_rows, w.num_rows) - 1;
  const bool one_head = w.row_begin / w.q_len == last_row / w.q_len;
  const TokenRange oldest = visible_tokens(w, one_head ? w.row_begin % w.q_len : 0);
  const TokenRange newest = visible_tokens(w, one_head ? last_row % w.q_len : w.q_len - 1);
  w.visible.begin = oldest.begin;
  w.visible.end = larger_int(newest.end, oldest.begin);
  w.tokens = w.visible;
  return w;
}

/// The share of a simdgroup of attend_vector or attend_matrix. `step`: tokens between two softmax updates.
template <typename T>
KV_FN Work find_work(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Place& place, int row_tile, int step) {
  const int row_tiles = param(b.params, kRowTiles);
  const int token_parts = param(b.params, kTokenParts);
  const int num_chunks = param(b.params, kNumChunks);
  Work w = find_rows(b, place, row_tile * row_tiles);
  if (row_tiles > 1) w.row_begin += place.simdgroup * row_tile;

  const int64_t chunk_tokens = b.params[kChunkTokens];
  if (chunk_tokens > 0) {
    const int64_t begin = place.x * chunk_tokens;
    if (begin > w.tokens.begin) w.tokens.begin = begin < w.tokens.end ? int(begin) : w.tokens.end;
    // The last chunk takes what is left, so that no launch loses a token.
    if (place.x < num_chunks - 1 && begin + chunk_tokens < w.tokens.end) w.tokens.end = int(begin + chunk_tokens);
    if (w.tokens.end < w.tokens.begin) w.tokens.end = w.tokens.begin;
  } else {
    w.tokens = part_of(w.tokens, place.x, num_chunks, step);
  }
  if (token_parts > 1) w.tokens = part_of(w.tokens, place.simdgroup, token_parts, step);
  return w;
}

/// Row `row` of the stream; one past the last stands for the last.
template <typename T>
KV_FN RowPlace place_of(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w, int row) {
  row = smaller_int(row, w.num_rows - 1);
  RowPlace at;
  at.head = w.kv_head * (w.num_rows / w.q_len) + row / w.q_len;
  at.query = row % w.q_len;
  at.result = (int64_t(w.seq) * b.params[kNumQHeads] + at.head) * w.q_len + at.query;
  return at;
}

template <typename T>
KV_FN KV_DEVICE const T* q_row(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w,
                               KV_THREAD const RowPlace& at) {
  return b.q + w.seq * b.q_strides[0] + at.head * b.q_strides[1] + at.query * b.q_strides[2];
}

// Scores are in units of log2. A hidden key has kHidden, which no score of a visible key falls below: a row whose every
// score is as low as floats go still has weights. All are finite, so that compilers that assume no infinities do no harm.
#define KV_HIDDEN (-3.0e38f)
#define KV_LOWEST (-2.9e38f)
#define KV_LOG2E 1.44269504088896340736f
#define KV_LN2 0.69314718055994530942f

/// The score of a (row, token) pair from its dot product. softcap(scale * dot) + ALiBi + mask.
template <typename T>
KV_FN float score_of(KV_THREAD const AttendBuffers<T>& b, KV_THREAD const Work& w, KV_THREAD const RowPlace& at,
                     TokenRange seen, int token, float dot) {
  bool hidden = token < seen.begin || token >= seen.end;
  float score = w.scale * dot;
  if (w.softcap > 0.0f) score = w.softcap * tanh_of(score / w.softcap);
  if (w.has_alibi != 0) score += b.alibi_slopes[at.head] * float(token - (w.kv_len - w.q_len + at.query));
  if (w.mask_kind != kMaskNone && !hidden) {
    const int64_t i = w.seq * b.mask_strides[0] + at.head * b.mask_strides[1] + at.query * b.mask_strides[2] +
                      token * b.mask_strides[3];
    if (w.mask_kind == kMaskBoolean) {
      hidden = b.mask[i] == 0;
    } else {
      const float added =
          w.mask_kind == kMaskAdditive ? float(((KV_DEVICE const T*)b.mask)[i]) : ((KV_DEVICE const float*)b.mask)[i];
      hidden = added < -3.402823466e38f;  // -inf
      score += added;
    }
  }
  score *= KV_LOG2E;
  if (score < KV_LOWEST) score = KV_LOWEST;  // a NaN stays one
  return hidden ? KV_HIDDEN : score;
}

/// 2^(score - max); 0 for a hidden key, whatever the maximum.
KV_FN float weight_of(float score, float high) { return score < KV_LOWEST ? 0.0f : exp2_fast(score - high); }

}  // namespace kvonce_metal
