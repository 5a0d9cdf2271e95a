// The contract between a launcher and the Metal kernel bodies; compiled unchanged by C++, CUDA and MSL, and read by Python
// (every constant is one line `kName = value,`).
//
// Kernels. Template axes: T (half, bfloat, float: q, k and v alike), kDimQk, kDimV, kRows (the row tile); nothing else.
//   attend_vector<T, kDimQk, kDimV, kRows>    kRows 1, 2, 4, 8 or 16; any head dims up to 512
//   attend_matrix<T, kDimQk, kDimV>           row tile 8; head dims are multiples of 16
//   attend_per_head<T, kDimQk, kDimV>         the baseline: row tile 1
//   merge_partials<T, kDimV>                  T: out's type
//
// Buffers of attend_*, in this order. Every array has at least 8 elements (MLX passes smaller ones in another address
// space); an array that the params do not announce is any 8 elements. Strides are MLX's x_strides, int64, in elements.
//   q             T [num_seqs, num_q_heads, q_len, kDimQk], any strides
//   k             T [num_seqs, num_kv_heads, kv_len, kDimQk], any strides
//   v             T [num_seqs, num_kv_heads, kv_len, kDimV], any strides
//   kv_lens       int32 [num_seqs], clamped to 0..kv_len; with kHasKvLens
//   kv_starts     int32 [num_seqs], first visible token, clamped to 0..length; with kHasKvStarts
//   mask          [num_seqs, num_q_heads, q_len, kv_len], any strides (0 broadcasts); type: kMaskKind
//   alibi_slopes  float32 [num_q_heads]; with kHasAlibi
//   params        int64 [kNumParams]
//   scalars       float32 [kNumScalars]
//   outputs: partial_o    float32 [num_seqs, num_q_heads, q_len, num_chunks, kDimV], packed
//            partial_sums float32 [num_seqs, num_q_heads, q_len, num_chunks, 2], packed
// Buffers of merge_partials: partial_o, partial_sums, sinks (float32 [num_q_heads]; with kHasSinks), params;
//   outputs: out T [num_seqs, num_q_heads, q_len, kDimV], packed; lse float32 [num_seqs, num_q_heads, q_len], packed.
// A partial is the project's (o normalised, no key: o = 0) with its lse in two numbers: lse = (m + log2(l)) * ln(2), m the
// largest score in units of log2 (-3e38 without a key) and l the sum of 2^(score - m) (0 without a key). One float32 would
// carry a score of 30,000 to 2^-9 only. The final lse is natural: scale, softcap and sink included; no key: -inf.
//
// Grid, in threadgroups; 32 threads of a threadgroup are a simdgroup:
//   attend_vector, attend_matrix: x num_chunks, y num_kv_heads * row_blocks, z num_seqs
//     32 * max(row_tiles, token_parts) threads, row_blocks = ceil(group_size * q_len / (kRows * row_tiles))
//   attend_per_head: the same with one simdgroup per row, up to 32: row_tiles of them, row_blocks = ceil(rows / row_tiles)
//   merge_partials: x num_seqs * num_q_heads * q_len; 32 * merge_simdgroups threads
// MLX's `grid` counts threads: multiply x by the threads of a threadgroup.
// Row r of a KV stream is query head kv_head * group_size + r / q_len, query token r % q_len. A row block is rows_per_worker =
// kRows * row_tiles rows; every byte of K and V that some row of the block sees is fetched once for the block. Read factor =
// row_blocks; of attend_per_head: group_size * q_len.
// Either row_tiles or token_parts is 1. row_tiles > 1: the simdgroups of a threadgroup take one row tile each and share K and V
// through threadgroup memory. token_parts > 1: they take contiguous parts of the threadgroup's token chunk and join their
// partials in threadgroup memory.
// Threadgroup memory: float[shared_floats(...)], passed as a pointer, also where the kernel needs none (then 1 float).
#pragma once

#if defined(__CUDACC__)
#define KVONCE_METAL_FN __host__ __device__ constexpr
#else
#define KVONCE_METAL_FN constexpr
#endif

namespace kvonce_metal {

/// Where each launch parameter stands in `params`.
enum Param : int {
  kNumSeqs = 0,
  kNumQHeads = 1,
  kNumKvHeads = 2,
  kQLen = 3,
  kKvLen = 4,      // tokens in k and v: every sequence's length, or with kv_lens the most
  kNumChunks = 5,  // threadgroups that share a KV stream's tokens
  kChunkTokens =
      6,  // > 0: chunk i is tokens [i * chunk_tokens, (i + 1) * chunk_tokens); 0: even shares of what is visible
  kRowTiles = 7,    // simdgroups side by side over rows
  kTokenParts = 8,  // simdgroups side by side over tokens
  kCausal = 9,      // 1: a row sees keys up to its own position (bottom-right aligned)
  kWindow = 10,     // > 0: only the last so many of them, its own included
  kMaskKind = 11,   // kMaskNone ...
  kHasKvLens = 12,
  kHasKvStarts = 13,
  kHasSinks = 14,
  kHasAlibi = 15,
  kMergeSimdgroups = 16,  // of merge_partials
  kNumParams = 24,        // the rest is 0
};

/// Where each float stands in `scalars`.
enum Scalar : int {
  kScale = 0,
  kSoftcap = 1,  // > 0: score = softcap * tanh(score / softcap)
  kNumScalars = 8,
};

enum MaskKind : int {
  kMaskNone = 0,
  kMaskBoolean = 1,      // one byte, 0 hides the key
  kMaskAdditive = 2,     // T, added to the scaled, capped score; -inf hides the key
  kMaskAdditiveF32 = 3,  // float32
};

enum Limit : int {
  kLanes = 32,
  kMaxHeadDim = 512,
  kMaxTokenParts = 16,
  kMaxRowTiles = 16,
  kMaxMergeSimdgroups = 8,
  kJoinFloats = 2048,       // of a join's round: token_parts * kDimV must not exceed it
  kStageBytes = 16384,      // what staged tokens may take before there are fewer of them, or pieces of a step
  kMaxSharedBytes = 32768,  // Metal's limit
};

/// Tokens between two softmax updates.
KVONCE_METAL_FN int step_tokens(bool matrix, int row_tile) { return matrix ? 16 : kLanes / row_tile; }

/// Tokens that row tiles share through threadgroup memory at a time.
KVONCE_METAL_FN int stage_tokens(bool matrix, int row_tile, int dim_qk, int dim_v, int element_bytes) {
  int tokens = step_tokens(matrix, row_tile) > 16 ? step_tokens(matrix, row_tile) : 16;
  while (tokens > step_tokens(matrix, row_tile) && tokens * (dim_qk + dim_v) * element_bytes > kStageBytes) tokens /= 2;
  return tokens;
}

/// 0 where row tiles share K and V of whole steps. Otherwise a step's K and V do not fit beside each other, and so many tokens of
/// K, later of V, are in threadgroup memory at a time; a power of two below step_tokens. Of the vector body alone.
KVONCE_METAL_FN int piece_tokens(bool matrix, int row_tile, int dim_qk, int dim_v, int element_bytes) {
  const int dims = dim_qk > dim_v ? dim_qk : dim_v;
  int tokens = step_tokens(matrix, row_tile);
  if (matrix || tokens * (dim_qk + dim_v) * element_bytes <= kMaxSharedBytes) return 0;
  while (tokens > 1 && tokens * dims * element_bytes > kStageBytes) tokens /= 2;
  return tokens;
}

/// Threadgroup memory of the tokens that row tiles share, in floats.
KVONCE_METAL_FN int stage_floats(bool matrix, int row_tile, int dim_qk, int dim_v, int element_bytes) {
  const int piece = piece_tokens(matrix, row_tile, dim_qk, dim_v, element_bytes);
  const int dims = dim_qk > dim_v ? dim_qk : dim_v;
  return piece > 0
             ? (piece * dims * element_bytes + 3) / 4
             : stage_tokens(matrix, row_tile, dim_qk, dim_v, element_bytes) * (dim_qk + dim_v) * element_bytes / 4;
}

/// Rows whose partials are joined between two barriers.
KVONCE_METAL_FN int join_rows(int token_parts, int row_tile, int dim_v) {
  return token_parts * row_tile * dim_v <= kJoinFloats ? row_tile
         : token_parts * dim_v >= kJoinFloats          ? 1
                                                       : kJoinFloats / (token_parts * dim_v);
}

/// Threadgroup memory of attend_vector and attend_matrix in floats. A launch needs 4 * this <= kMaxSharedBytes.
KVONCE_METAL_FN int shared_floats(bool matrix, int row_tile, int dim_qk, int dim_v, int element_bytes, int row_tiles,
                                  int token_parts) {
  return row_tiles > 1     ? stage_floats(matrix, row_tile, dim_qk, dim_v, element_bytes)
         : token_parts > 1 ? token_parts * (2 * row_tile + join_rows(token_parts, row_tile, dim_v) * dim_v)
                           : 1;
}

/// Threadgroup memory of merge_partials in floats.
KVONCE_METAL_FN int merge_shared_floats(int merge_simdgroups, int dim_v) { return merge_simdgroups * dim_v; }

}  // namespace kvonce_metal
