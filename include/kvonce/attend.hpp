// attend: runs a plan on the caller's tensors. merge: joins partial results.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvonce/plan.hpp"

namespace kvonce {

/// A q, K or V tensor, element [seq][head][token][dim] at data + seq*seq_stride + head*head_stride + token*token_stride + dim.
/// Strides are in elements (in blocks for block formats); the last dim is contiguous. Owned by the caller.
struct TensorView {
  const void* data = nullptr;  // may be null only when the tensor has no elements
  std::int64_t seq_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};

/// Sequences [seq_begin, seq_end) read tokens [token_begin, token_end) of K/V sequence kv_seq.
struct Segment {
  std::int64_t seq_begin = 0;
  std::int64_t seq_end = 0;
  std::int64_t kv_seq = 0;
  std::int64_t token_begin = 0;
  std::int64_t token_end = 0;
};

/// Everything attend reads. A pointer may be null unless the comment says otherwise; what the plan's Problem does not
/// announce must be null and is refused otherwise.
struct Inputs {
  TensorView q;  // [num_seqs, num_q_heads, q_len, head_dim_qk] of q_dtype
  TensorView k;  // [num_seqs, num_kv_heads, kv_len, head_dim_qk] of k_format; paged: [num_pages, ...], strides per page
  TensorView v;  // [num_seqs, num_kv_heads, kv_len, head_dim_v] of v_format

  std::int64_t kv_len = -1;  // tokens in k and v: every sequence's length, or with kv_lens the most; -1: max_kv_len
  const std::int32_t* kv_lens = nullptr;    // [num_seqs] valid tokens, 0..kv_len; null: kv_len everywhere
  const std::int32_t* kv_starts = nullptr;  // [num_seqs] first visible token (left padding), 0..kv_len; null: 0

  const void* mask = nullptr;        // per Problem::mask; strides 0 broadcast
  std::int64_t mask_seq_stride = 0;  // in elements
  std::int64_t mask_head_stride = 0;
  std::int64_t mask_row_stride = 0;
  std::int64_t mask_token_stride = 1;

  const float* sinks = nullptr;         // [num_q_heads] with Problem::has_sinks
  const float* alibi_slopes = nullptr;  // [num_q_heads] with Problem::has_alibi, times (key position - row position)
  const float* mask_slopes = nullptr;   // [num_q_heads] with Problem::has_mask_slopes, times the mask's entries

  const std::int32_t* block_table = nullptr;  // paged: [num_seqs, >= ceil(kv_len / page_size)] page ids
  std::int64_t block_table_stride = 0;        // page ids between two sequences
  std::int64_t num_pages = 0;                 // pages in k and v

  /// MLX: [num_seqs, num_kv_heads, kv_len, head_dim_qk / quant_group] of scales_dtype, strides of its own; f8_e4m3: float
  /// [num_kv_heads].
  TensorView k_scales;
  TensorView v_scales;  // the same of v, head_dim_v
  TensorView k_biases;  // MLX: as k_scales
  TensorView v_biases;

  const Segment* segments = nullptr;  // with Problem::has_segments
  std::int64_t num_segments = 0;
};

/// Everything attend writes.
struct Outputs {
  void* out =
      nullptr;  // [num_seqs, num_q_heads, q_len, head_dim_v] of out_dtype, last dim contiguous; must not overlap inputs
  std::int64_t out_seq_stride = 0;  // in elements
  std::int64_t out_head_stride = 0;
  std::int64_t out_token_stride = 0;
  float* lse = nullptr;  // [num_seqs, num_q_heads, q_len] natural log; null: not wanted
  std::int64_t lse_seq_stride = 0;
  std::int64_t lse_head_stride = 0;
  std::int64_t lse_token_stride = 0;
};

/// Calls body(body_context, i) for every i in [0, count), concurrently if it can, and returns when all have returned.
using ParallelFor = void (*)(void* host, std::int64_t count, void (*body)(void* body_context, std::int64_t i),
                             void* body_context);

/// What the caller's runtime lends to one call.
struct Context {
  ParallelFor parallel_for = nullptr;  // the host's own team; null: kvonce's pool
  void* parallel_for_host = nullptr;   // passed through as `host`
  int num_threads = 0;                 // at most this many at once, <= plan.device().num_threads; 0: the plan's number
  void* cuda_stream = nullptr;         // cudaStream_t of the CUDA backend
};

/// CUDA: makes a workspace ready for any number of calls of this plan, one after the other; enqueued on the context's
/// stream, once, before the first. Needed again after a call that did not finish. attend() with a workspace that nobody
/// prepared gives NaN where the plan joins partials in it. Other backends need nothing: there it only checks its arguments. Errors as attend().
KVONCE_API void prepare_workspace(const Plan& plan, void* workspace, std::size_t workspace_bytes,
                                  const Context& context = {});

/// CUDA: waits for the context's stream and throws Error{InvalidArgument} when, since the workspace was prepared, a
/// device-resident length was below 0 or above Inputs::kv_len (it was clamped). Other backends check lengths in attend().
KVONCE_API void check_workspace(const Plan& plan, void* workspace, std::size_t workspace_bytes,
                                const Context& context = {});

/// Runs the plan. Allocates nothing. CUDA: every pointer of inputs, outputs and the workspace is device memory, and the
/// work is enqueued on the context's stream (null: the default stream) of the plan's device, whichever is current; may
/// be captured in a graph. kv_lens and kv_starts are read by the kernel: see check_workspace(). `workspace` is at least plan.workspace_bytes() long, at any alignment, and may be
/// used by one call at a time. Throws Error{InvalidArgument} before anything is written.
KVONCE_API void attend(const Plan& plan, const Inputs& inputs, const Outputs& outputs, void* workspace,
                       std::size_t workspace_bytes, const Context& context = {});

/// Joins `num_parts` partials of the same rows into one: (o, lse) of attention over the union of their disjoint token
/// ranges. (0, -inf) is neutral. Parts are joined in index order, so the result is bitwise repeatable.
/// Only one part of a row may carry the row's sink. All float32; out may be one of the parts.
struct MergeInputs {
  const float* o = nullptr;        // [num_parts, num_rows, head_dim_v], last dim contiguous
  const float* lse = nullptr;      // [num_parts, num_rows]
  std::int64_t num_parts = 0;      // >= 1
  std::int64_t num_rows = 0;       // >= 0
  std::int64_t head_dim_v = 0;     // >= 1
  std::int64_t o_part_stride = 0;  // in elements
  std::int64_t o_row_stride = 0;
  std::int64_t lse_part_stride = 0;
  std::int64_t lse_row_stride = 1;
};
KVONCE_API void merge(const MergeInputs& inputs, float* out, std::int64_t out_row_stride, float* lse);

}  // namespace kvonce
