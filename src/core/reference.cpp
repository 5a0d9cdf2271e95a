// The oracle. Per KV stream (sequence, KV head), in double:
//   [1] where the keys are: position in the sequence's key list -> K/V row in memory
//   [2] score of every (row, key) pair; -inf where the row must not see the key, whose K is then not read
//   [3] softmax over the row's scores and its sink
//   [4] out = sum of weight * V over the keys that are not hidden
#include "core/reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "core/validate.hpp"
#include "shared/numeric.h"
#include "shared/token_range.h"

namespace kvonce::core {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();
constexpr std::int64_t kBlockValues = 32;  // values per GGML block
constexpr std::int64_t kQ80BlockBytes = 34;
constexpr std::int64_t kQ40BlockBytes = 18;

std::uint16_t load_u16(const unsigned char* at) {
  std::uint16_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

double load_f32(const void* base, std::int64_t idx) {
  float value = 0;
  std::memcpy(&value, static_cast<const unsigned char*>(base) + idx * 4, sizeof value);
  return value;
}

// Bytes between a tensor's start and the row that begins `offset` elements (blocks for block formats) after it.
std::int64_t row_byte_offset(KvFormat format, std::int64_t offset) {
  switch (format) {
    case KvFormat::f32:
      return offset * 4;
    case KvFormat::f16:
    case KvFormat::bf16:
      return offset * 2;
    case KvFormat::f8_e4m3:
    case KvFormat::mlx_int8:
      return offset;
    case KvFormat::mlx_int4:
      return offset / 2;
    case KvFormat::q8_0:
      return offset * kQ80BlockBytes;
    case KvFormat::q4_0:
      return offset * kQ40BlockBytes;
  }
  return 0;
}

bool is_mlx(KvFormat format) { return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4; }

KvFormat format_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return KvFormat::f32;
    case DType::f16:
      return KvFormat::f16;
    case DType::bf16:
      return KvFormat::bf16;
  }
  return KvFormat::f32;
}

// One of K and V with what is needed to decode it.
struct Cache {
  KvFormat format;
  TensorView view;
  TensorView scales;
  TensorView biases;
  DType scales_dtype;
  std::int64_t quant_group;
  std::int64_t dim;

  // Reads row (seq_or_page, head, token) into values[0, dim).
  void read_row(std::int64_t seq_or_page, std::int64_t head, std::int64_t token, double* values) const {
    const auto offset_in = [=](const TensorView& tensor) {
      return seq_or_page * tensor.seq_stride + head * tensor.head_stride + token * tensor.token_stride;
    };
    const void* row = static_cast<const unsigned char*>(view.data) + row_byte_offset(format, offset_in(view));
    for (std::int64_t i = 0; i < dim; ++i) {
      double scale = 1.0;
      double bias = 0.0;
      if (format == KvFormat::f8_e4m3) scale = load_f32(scales.data, head);
      if (is_mlx(format)) {
        scale = decode_value(format_of(scales_dtype), scales.data, offset_in(scales) + i / quant_group);
        bias = decode_value(format_of(scales_dtype), biases.data, offset_in(biases) + i / quant_group);
      }
      values[i] = decode_value(format, row, i, scale, bias);
    }
  }
};

// Where the keys of one sequence are: positions [first_position, first_position + num_tokens) of its key list are tokens
// [token_begin, token_begin + num_tokens) of K/V sequence kv_seq.
struct KeyRun {
  std::int64_t first_position;
  std::int64_t num_tokens;
  std::int64_t kv_seq;
  std::int64_t token_begin;
};

std::vector<KeyRun> key_runs(const Problem& problem, const Inputs& inputs, std::int64_t seq) {
  if (!problem.has_segments) {
    const std::int64_t kv_len = inputs.kv_lens != nullptr ? inputs.kv_lens[seq] : most_tokens(problem, inputs);
    return {{0, kv_len, seq, 0}};
  }
  std::vector<KeyRun> runs;
  std::int64_t position = 0;
  for (std::int64_t i = 0; i < inputs.num_segments; ++i) {
    const Segment& segment = inputs.segments[i];
    if (seq < segment.seq_begin || seq >= segment.seq_end) continue;
    const std::int64_t num_tokens = segment.token_end - segment.token_begin;
    runs.push_back({position, num_tokens, segment.kv_seq, segment.token_begin});
    position += num_tokens;
  }
  return runs;
}

// A key's indices into K and V.
struct KeyPlace {
  std::int64_t seq_or_page;
  std::int64_t token;
};

KeyPlace key_place(const Problem& problem, const Inputs& inputs, const std::vector<KeyRun>& runs,
                   std::int64_t position) {
  for (const KeyRun& run : runs) {
    if (position >= run.first_position + run.num_tokens) continue;
    const std::int64_t token = run.token_begin + position - run.first_position;
    if (problem.layout == KvLayout::strided) return {run.kv_seq, token};
    const std::int32_t page = inputs.block_table[run.kv_seq * inputs.block_table_stride + token / problem.page_size];
    return {page, token % problem.page_size};
  }
  return {0, 0};
}

// The row and key a mask entry is asked for. `key` is a position in the sequence's key list.
struct Pair {
  std::int64_t seq;
  std::int64_t q_head;
  std::int64_t query_idx;
  std::int64_t key;
  std::int64_t kv_len;
  std::int64_t kv_start;
};

// What is added to the scaled, soft-capped score: kHidden when the row must not see the key.
double bias_of(const Problem& problem, const Inputs& inputs, const Pair& pair) {
  const shared::TokenRange visible =
      shared::visible_range(pair.query_idx, problem.q_len, pair.kv_len, pair.kv_start, problem.causal, problem.window);
  if (pair.key < visible.begin || pair.key >= visible.end) return kHidden;

  const std::int64_t first_new_key = pair.kv_len - problem.q_len;
  double bias = 0.0;
  if (problem.has_alibi) {
    bias += static_cast<double>(inputs.alibi_slopes[pair.q_head]) *
            static_cast<double>(pair.key - (first_new_key + pair.query_idx));
  }
  if (problem.mask == MaskKind::tree) {
    if (pair.key >= first_new_key) {
      const std::int64_t at = pair.seq * inputs.mask_seq_stride + pair.query_idx * inputs.mask_row_stride +
                              (pair.key - first_new_key) * inputs.mask_token_stride;
      if (static_cast<const std::uint8_t*>(inputs.mask)[at] == 0) return kHidden;
    }
    return bias;
  }
  const std::int64_t at = pair.seq * inputs.mask_seq_stride + pair.q_head * inputs.mask_head_stride +
                          pair.query_idx * inputs.mask_row_stride + pair.key * inputs.mask_token_stride;
  if (problem.mask == MaskKind::boolean) {
    if (static_cast<const std::uint8_t*>(inputs.mask)[at] == 0) return kHidden;
  }
  if (problem.mask == MaskKind::additive) {
    const double added = decode_value(format_of(problem.mask_dtype), inputs.mask, at);
    if (added == kHidden) return kHidden;  // before the slope: 0 * -inf would be NaN
    bias += problem.has_mask_slopes ? static_cast<double>(inputs.mask_slopes[pair.q_head]) * added : added;
  }
  return bias;
}

double dot(const double* a, const double* b, std::int64_t count) {
  double sums[4] = {0.0, 0.0, 0.0, 0.0};
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (std::int64_t j = 0; j < 4; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// One KV stream. Row r is query token r % q_len of query head kv_head * group_size + r / q_len.
class Stream {
 public:
  Stream(const Problem& problem, const Inputs& inputs, std::int64_t seq, std::int64_t kv_head)
      : problem_(problem),
        inputs_(inputs),
        seq_(seq),
        kv_head_(kv_head),
        num_rows_(problem.rows_per_stream()),
        runs_(key_runs(problem, inputs, seq)),
        kv_len_(runs_.empty() ? 0 : runs_.back().first_position + runs_.back().num_tokens),
        kv_start_(inputs.kv_starts != nullptr ? inputs.kv_starts[seq] : 0),
        scores_(static_cast<std::size_t>(num_rows_ * kv_len_), kHidden) {}

  void run(ReferenceResult& result) {
    score_keys();
    for (std::int64_t row = 0; row < num_rows_; ++row) softmax_row(row, result.lse[result_row(row)]);
    accumulate_values(result.out);
  }

 private:
  [[nodiscard]] std::int64_t q_head(std::int64_t row) const {
    return kv_head_ * problem_.group_size() + row / problem_.q_len;
  }
  [[nodiscard]] std::int64_t query_idx(std::int64_t row) const { return row % problem_.q_len; }
  [[nodiscard]] std::size_t result_row(std::int64_t row) const {
    return static_cast<std::size_t>((seq_ * problem_.num_q_heads + q_head(row)) * problem_.q_len + query_idx(row));
  }
  // K, of which the first `dim` values of a row are read.
  [[nodiscard]] Cache keys(std::int64_t dim) const {
    return {problem_.k_format,    inputs_.k, inputs_.k_scales, inputs_.k_biases, problem_.scales_dtype,
            problem_.quant_group, dim};
  }
  double& score(std::int64_t row, std::int64_t key) { return scores_[static_cast<std::size_t>(row * kv_len_ + key)]; }

  void score_keys() {
    const std::int64_t dim = problem_.head_dim_qk;
    const double scale =
        problem_.scale.has_value() ? static_cast<double>(*problem_.scale) : 1.0 / std::sqrt(static_cast<double>(dim));
    std::vector<double> q(static_cast<std::size_t>(num_rows_ * dim));
    const Cache q_rows{format_of(problem_.q_dtype), inputs_.q, {}, {}, DType::f32, 1, dim};
    for (std::int64_t row = 0; row < num_rows_; ++row) {
      q_rows.read_row(seq_, q_head(row), query_idx(row), q.data() + row * dim);
    }

    const Cache k_rows = keys(dim);
    std::vector<double> k(static_cast<std::size_t>(dim));
    for (std::int64_t key = 0; key < kv_len_; ++key) {
      bool have_key = false;
      for (std::int64_t row = 0; row < num_rows_; ++row) {
        const double bias = bias_of(problem_, inputs_, {seq_, q_head(row), query_idx(row), key, kv_len_, kv_start_});
        if (bias == kHidden) continue;
        if (!have_key) {
          const KeyPlace place = key_place(problem_, inputs_, runs_, key);
          k_rows.read_row(place.seq_or_page, kv_head_, place.token, k.data());
          have_key = true;
        }
        double s = scale * dot(q.data() + row * dim, k.data(), dim);
        const auto softcap = static_cast<double>(problem_.softcap);
        if (softcap > 0.0) s = softcap * std::tanh(s / softcap);
        score(row, key) = s + bias;
      }
    }
  }

  // Turns the row's scores into weights that sum to 1 together with the sink's; hidden keys stay kHidden.
  void softmax_row(std::int64_t row, double& lse) {
    const double sink = problem_.has_sinks ? static_cast<double>(inputs_.sinks[q_head(row)]) : kHidden;
    double largest = sink;
    bool has_nan = false;
    for (std::int64_t key = 0; key < kv_len_; ++key) {
      largest = std::max(largest, score(row, key));
      has_nan = has_nan || std::isnan(score(row, key));
    }
    if (has_nan) largest = std::numeric_limits<double>::quiet_NaN();
    if (largest == kHidden) {
      lse = kHidden;
      return;
    }
    double sum = std::exp(sink - largest);
    for (std::int64_t key = 0; key < kv_len_; ++key) sum += std::exp(score(row, key) - largest);
    lse = largest + std::log(sum);
    for (std::int64_t key = 0; key < kv_len_; ++key) {
      double& s = score(row, key);
      if (s != kHidden) s = std::exp(s - largest) / sum;
    }
  }

  void accumulate_values(std::vector<double>& out) {
    const std::int64_t dim = problem_.dim_v();
    Cache v_rows{problem_.v_format,    inputs_.v, inputs_.v_scales, inputs_.v_biases, problem_.scales_dtype,
                 problem_.quant_group, dim};
    if (problem_.v_is_k_prefix) v_rows = keys(dim);
    std::vector<double> v(static_cast<std::size_t>(dim));
    for (std::int64_t key = 0; key < kv_len_; ++key) {
      bool have_key = false;
      for (std::int64_t row = 0; row < num_rows_; ++row) {
        const double weight = score(row, key);
        if (weight == kHidden) continue;
        if (!have_key) {
          const KeyPlace place = key_place(problem_, inputs_, runs_, key);
          v_rows.read_row(place.seq_or_page, kv_head_, place.token, v.data());
          have_key = true;
        }
        double* o = out.data() + result_row(row) * static_cast<std::size_t>(dim);
        for (std::int64_t i = 0; i < dim; ++i) o[i] += weight * v[static_cast<std::size_t>(i)];
      }
    }
  }

  const Problem& problem_;
  const Inputs& inputs_;
  std::int64_t seq_;
  std::int64_t kv_head_;
  std::int64_t num_rows_;
  std::vector<KeyRun> runs_;
  std::int64_t kv_len_;
  std::int64_t kv_start_;
  std::vector<double> scores_;  // [num_rows, kv_len]
};

}  // namespace

double decode_value(KvFormat format, const void* row, std::int64_t idx, double scale, double bias) {
  const auto* bytes = static_cast<const unsigned char*>(row);
  switch (format) {
    case KvFormat::f32:
      return load_f32(row, idx);
    case KvFormat::f16:
      return shared::f16_to_f32(load_u16(bytes + 2 * idx));
    case KvFormat::bf16:
      return shared::bf16_to_f32(load_u16(bytes + 2 * idx));
    case KvFormat::f8_e4m3:
      return scale * shared::f8_e4m3_to_f32(bytes[idx]);
    case KvFormat::mlx_int8:
      return scale * bytes[idx] + bias;
    case KvFormat::mlx_int4:
      return scale * ((bytes[idx / 2] >> (4 * (idx % 2))) & 0xf) + bias;
    case KvFormat::q8_0: {
      const unsigned char* block = bytes + idx / kBlockValues * kQ80BlockBytes;
      const auto code = static_cast<std::int8_t>(block[2 + idx % kBlockValues]);
      return static_cast<double>(shared::f16_to_f32(load_u16(block))) * code;
    }
    case KvFormat::q4_0: {
      const unsigned char* block = bytes + idx / kBlockValues * kQ40BlockBytes;
      const std::int64_t i = idx % kBlockValues;
      const int code = i < kBlockValues / 2 ? block[2 + i] & 0xf : block[2 + i - kBlockValues / 2] >> 4;
      return static_cast<double>(shared::f16_to_f32(load_u16(block))) * (code - 8);
    }
  }
  return 0.0;
}

ReferenceResult reference_attend(const Problem& problem, const Inputs& inputs) {
  ReferenceResult result;
  const std::int64_t num_rows = problem.num_seqs * problem.num_q_heads * problem.q_len;
  result.out.assign(static_cast<std::size_t>(num_rows * problem.dim_v()), 0.0);
  result.lse.assign(static_cast<std::size_t>(num_rows), kHidden);
  if (num_rows == 0) return result;
  for (std::int64_t seq = 0; seq < problem.num_seqs; ++seq) {
    for (std::int64_t kv_head = 0; kv_head < problem.num_kv_heads; ++kv_head) {
      Stream(problem, inputs, seq, kv_head).run(result);
    }
  }
  return result;
}

}  // namespace kvonce::core
