// Problem: what is asked, without pointers and without lengths.
#pragma once

#include <cstdint>
#include <optional>

#include "kvonce/types.hpp"

namespace kvonce {

/// A decode-attention problem. One Plan made from it serves every kv_len from 0 to max_kv_len.
///
/// Row i of a sequence (its i-th query token, 0 <= i < q_len) stands at position kv_len - q_len + i: the newest query
/// token sees the newest key (bottom-right alignment). A row that sees no key gives out = 0 and lse = -inf.
/// score = softcap(scale * q.k) + alibi + mask; lse is the natural logarithm of the sum of exp(score).
struct Problem {
  std::int64_t num_seqs = 1;      // >= 0
  std::int64_t q_len = 1;         // query tokens per sequence, 0..64
  std::int64_t num_q_heads = 0;   // >= 1, a multiple of num_kv_heads
  std::int64_t num_kv_heads = 0;  // >= 1
  std::int64_t head_dim_qk = 0;   // 1..1024
  std::int64_t head_dim_v = 0;    // 1..1024; 0 means head_dim_qk
  std::int64_t max_kv_len = 0;    // tokens, 0..2^31-1

  DType q_dtype = DType::f32;
  DType out_dtype = DType::f32;
  KvFormat k_format = KvFormat::f32;
  KvFormat v_format = KvFormat::f32;  // K and V may differ
  std::int64_t quant_group = 0;       // values per scale and bias of the MLX formats: 32, 64 or 128; 0 otherwise
  DType scales_dtype = DType::f32;    // of the MLX formats' scales and biases; f32 otherwise
  KvLayout layout = KvLayout::strided;
  std::int64_t page_size = 0;  // tokens per page of the paged layouts, >= 1; 0 otherwise
  bool v_is_k_prefix = false;  // V is K's first head_dim_v dims (same memory): its bytes count once

  std::optional<float> scale = std::nullopt;  // default head_dim_qk^-0.5
  bool causal = true;                         // a row sees keys up to its own position
  std::int64_t window = 0;  // a row sees only the last `window` keys up to its own position, itself included; 0: all
  MaskKind mask = MaskKind::none;
  DType mask_dtype = DType::f32;  // elements of an additive mask; f32 with any other
  float softcap = 0.0F;           // > 0: score becomes softcap * tanh(score / softcap)
  bool has_sinks = false;         // Inputs::sinks: one extra logit per query head
  bool has_alibi = false;         // Inputs::alibi_slopes
  bool has_mask_slopes = false;   // Inputs::mask_slopes multiply an additive mask
  bool has_segments = false;      // Inputs::segments: which sequences read which token range (shared prefixes)

  [[nodiscard]] std::int64_t group_size() const noexcept { return num_kv_heads > 0 ? num_q_heads / num_kv_heads : 0; }
  [[nodiscard]] std::int64_t dim_v() const noexcept { return head_dim_v > 0 ? head_dim_v : head_dim_qk; }
  /// Rows that read one KV stream: group_size * q_len.
  [[nodiscard]] std::int64_t rows_per_stream() const noexcept { return group_size() * q_len; }

  [[nodiscard]] bool operator==(const Problem&) const = default;
};

}  // namespace kvonce
