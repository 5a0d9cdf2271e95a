// Shapes: ggml counts dims from the innermost. q [head_dim_qk, q_len, num_q_heads, num_seqs] float32, k and v
// [head_dim, cells, num_kv_heads, num_seqs] (views of token-major caches), mask [cells, >= q_len, 1 or num_q_heads,
// 1 or num_seqs] float16, sinks [num_q_heads] float32, result [head_dim_v, num_q_heads, q_len, num_seqs] float32.
#include "op.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace kvonce::ggml {
namespace {

enum Param { kScale = 0, kMaxBias = 1, kSoftcap = 2 };

float float_param(const ggml_tensor& node, Param idx) {
  float value = 0.0F;
  std::memcpy(&value, &node.op_params[idx], sizeof value);
  return value;
}

struct Format {
  ggml_type type;
  KvFormat format;
  std::int64_t block_values;
  std::size_t block_bytes;
};

constexpr Format kFormats[] = {
    {GGML_TYPE_F32, KvFormat::f32, 1, 4},     {GGML_TYPE_F16, KvFormat::f16, 1, 2},
    {GGML_TYPE_BF16, KvFormat::bf16, 1, 2},   {GGML_TYPE_Q8_0, KvFormat::q8_0, 32, 34},
    {GGML_TYPE_Q4_0, KvFormat::q4_0, 32, 18},
};

const Format* format_of(ggml_type type) {
  for (const Format& format : kFormats) {
    if (format.type == type) return &format;
  }
  return nullptr;
}

bool has_whole_strides(const ggml_tensor& t, std::size_t block_bytes) {
  return t.nb[0] == block_bytes && t.nb[1] % block_bytes == 0 && t.nb[2] % block_bytes == 0 &&
         t.nb[3] % block_bytes == 0;
}

bool is_on_host(const Host& host, const ggml_tensor* t) {
  if (t == nullptr) return true;
  ggml_backend_buffer* buffer = t->view_src != nullptr ? t->view_src->buffer : t->buffer;
  return buffer == nullptr || host.buft_is_host(host.buffer_get_type(buffer));
}

const char* read_mask(const ggml_tensor& mask, const ggml_tensor& q, const ggml_tensor& k) {
  if (mask.type != GGML_TYPE_F16) return "mask is not f16";
  if (mask.ne[0] != k.ne[1] || mask.ne[1] < q.ne[1]) return "mask is smaller than cells x query tokens";
  if (mask.ne[2] != 1 && mask.ne[2] != q.ne[2]) return "mask repeats over some of the heads";
  if (mask.ne[3] != 1 && mask.ne[3] != q.ne[3]) return "mask repeats over some of the sequences";
  if (!has_whole_strides(mask, sizeof(ggml_fp16_t))) return "mask has gaps between its values";
  return nullptr;
}

constexpr std::uint16_t kHidden = 0xfc00;  // -inf in float16

/// Entries before the first, from `begin` on, that is not kHidden; at most `end`.
std::int64_t first_visible(const std::uint16_t* entries, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kBlock = 64;  // looked at as one, without branches
  const auto hides = [&](std::int64_t at, std::int64_t count) {
    unsigned other = 0;
    for (std::int64_t i = at; i < at + count; ++i) other |= static_cast<unsigned>(entries[i] ^ kHidden);
    return other == 0;
  };
  while (begin + kBlock <= end && hides(begin, kBlock)) begin += kBlock;
  while (begin < end && entries[begin] == kHidden) ++begin;
  return begin;
}

TensorView view_of(const ggml_tensor& t, std::size_t block_bytes) {
  const auto stride = [&](int dim) { return static_cast<std::int64_t>(t.nb[dim] / block_bytes); };
  return {t.data, stride(3), stride(2), stride(1)};
}

}  // namespace

float max_bias_of(const ggml_tensor& node) { return float_param(node, kMaxBias); }

const char* read_problem(const Host& host, const ggml_tensor& node, Problem& problem) {
  const ggml_tensor& q = *node.src[0];
  const ggml_tensor& k = *node.src[1];
  const ggml_tensor& v = *node.src[2];
  const ggml_tensor* mask = node.src[3];
  const ggml_tensor* sinks = node.src[4];
  if (q.ne[1] > kMaxQLen) return "more than 16 query tokens";
  if (q.type != GGML_TYPE_F32 || node.type != GGML_TYPE_F32) return "query or result is not f32";
  const Format* k_format = format_of(k.type);
  const Format* v_format = format_of(v.type);
  if (k_format == nullptr || v_format == nullptr) return "cache type other than f32, f16, bf16, q8_0, q4_0";
  if (k.ne[2] != v.ne[2] || q.ne[2] % k.ne[2] != 0) return "K and V have different numbers of heads";
  if (k.ne[3] != q.ne[3] || v.ne[3] != q.ne[3]) return "sequences share a cache tensor";
  if (k.ne[1] != v.ne[1]) return "K and V have different numbers of cells";
  if (!has_whole_strides(q, sizeof(float)) || !has_whole_strides(node, sizeof(float)) ||
      !has_whole_strides(k, k_format->block_bytes) || !has_whole_strides(v, v_format->block_bytes)) {
    return "a tensor's rows are not contiguous";
  }
  if (mask != nullptr) {
    if (const char* reason = read_mask(*mask, q, k)) return reason;
  }
  if (max_bias_of(node) > 0.0F && mask == nullptr) return "max_bias without a mask";
  if (sinks != nullptr && (sinks->type != GGML_TYPE_F32 || sinks->ne[0] != q.ne[2] || sinks->nb[0] != sizeof(float))) {
    return "sinks are not one f32 per query head";
  }
  for (const ggml_tensor* t : {&q, &k, &v, mask, sinks, &node}) {
    if (!is_on_host(host, t)) return "a tensor is not in host memory";
  }

  problem = Problem{};
  problem.num_seqs = q.ne[3];
  problem.q_len = q.ne[1];
  problem.num_q_heads = q.ne[2];
  problem.num_kv_heads = k.ne[2];
  problem.head_dim_qk = k.ne[0];
  problem.head_dim_v = v.ne[0];
  problem.max_kv_len = k.ne[1];
  problem.k_format = k_format->format;
  problem.v_format = v_format->format;
  problem.scale = float_param(node, kScale);
  problem.causal = false;  // the mask says who sees what
  problem.softcap = float_param(node, kSoftcap);
  if (mask != nullptr) {
    problem.mask = MaskKind::additive;
    problem.mask_dtype = DType::f16;
  }
  problem.has_mask_slopes = max_bias_of(node) > 0.0F;
  problem.has_sinks = sinks != nullptr;
  return nullptr;
}

PlanOptions plan_options(const Problem& problem) {
  // A token's heads lie side by side in llama.cpp's cache and a worker takes them together, so chunks of tokens are all that
  // threads share: 16 of them in short caches, where a chunk's partials are still a few per cent of its bytes.
  const auto cells = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(problem.max_kv_len)));
  PlanOptions options;
  options.chunk_tokens = std::clamp<std::int64_t>(cells / 16, 64, 512);
  return options;
}

Cells visible_cells(const ggml_tensor& node, std::int64_t seq) {
  const std::int64_t num_cells = node.src[1]->ne[1];
  const ggml_tensor* mask = node.src[3];
  if (mask == nullptr) return {0, static_cast<std::int32_t>(num_cells)};
  std::int64_t begin = num_cells;
  std::int64_t end = 0;
  for (std::int64_t head = 0; head < mask->ne[2]; ++head) {
    for (std::int64_t row = 0; row < node.src[0]->ne[1]; ++row) {
      const auto offset = static_cast<std::int64_t>(mask->nb[3]) * (seq % mask->ne[3]) +
                          static_cast<std::int64_t>(mask->nb[2]) * head + static_cast<std::int64_t>(mask->nb[1]) * row;
      const auto* entries = reinterpret_cast<const std::uint16_t*>(static_cast<const char*>(mask->data) + offset);
      begin = first_visible(entries, 0, begin);
      std::int64_t last = num_cells;
      while (last > end && entries[last - 1] == kHidden) --last;
      end = last;
    }
  }
  return {static_cast<std::int32_t>(std::min(begin, end)), static_cast<std::int32_t>(end)};
}

void fill_slopes(float max_bias, std::int64_t num_q_heads, float* slopes) {
  std::int64_t base = 1;  // the largest power of two that is not above num_q_heads
  while (2 * base <= num_q_heads) base *= 2;
  const float step = std::exp2(-max_bias / static_cast<float>(base));
  const float half_step = std::exp2(-max_bias / 2.0F / static_cast<float>(base));
  for (std::int64_t head = 0; head < num_q_heads; ++head) {
    slopes[head] = head < base ? std::pow(step, static_cast<float>(head + 1))
                               : std::pow(half_step, static_cast<float>(2 * (head - base) + 1));
  }
}

Inputs inputs_of(const ggml_tensor& node) {
  Inputs in;
  in.q = view_of(*node.src[0], sizeof(float));
  in.k = view_of(*node.src[1], format_of(node.src[1]->type)->block_bytes);
  in.v = view_of(*node.src[2], format_of(node.src[2]->type)->block_bytes);
  if (const ggml_tensor* mask = node.src[3]) {
    const TensorView view = view_of(*mask, sizeof(ggml_fp16_t));
    in.mask = view.data;
    in.mask_seq_stride = mask->ne[3] == 1 ? 0 : view.seq_stride;
    in.mask_head_stride = mask->ne[2] == 1 ? 0 : view.head_stride;
    in.mask_row_stride = view.token_stride;
  }
  if (node.src[4] != nullptr) in.sinks = static_cast<const float*>(node.src[4]->data);
  return in;
}

Outputs outputs_of(const ggml_tensor& node) {
  const TensorView view = view_of(node, sizeof(float));
  Outputs out;
  out.out = node.data;
  out.out_seq_stride = view.seq_stride;
  out.out_token_stride = view.head_stride;  // ggml's result has tokens outside heads
  out.out_head_stride = view.token_stride;
  return out;
}

}  // namespace kvonce::ggml
