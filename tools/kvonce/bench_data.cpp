#include "kvonce/bench_data.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/reference.hpp"
#include "shared/ggml_blocks.h"
#include "shared/numeric.h"

namespace kvonce::tool {
namespace {

constexpr std::int64_t kSetAlignment = 4096;

// The oracle for one row of a case: a problem with one head and one query token that ends where the row's keys end.
std::vector<double> reference_row(const Problem& problem, const Inputs& inputs, std::int64_t seq, std::int64_t head,
                                  std::int64_t query_idx) {
  Problem row = problem;
  row.num_seqs = row.q_len = row.num_q_heads = row.num_kv_heads = 1;
  if (problem.causal) row.max_kv_len = std::max<std::int64_t>(0, problem.max_kv_len - problem.q_len + 1 + query_idx);
  const auto advance = [](TensorView& view, std::int64_t elements, std::int64_t element_bytes) {
    view.data = static_cast<const char*>(view.data) + elements * element_bytes;
  };
  const auto to_head = [&](TensorView& view, KvFormat format) {
    if (view.data == nullptr) return;
    const std::int64_t offset = seq * view.seq_stride + head / problem.group_size() * view.head_stride;
    // Two 4-bit codes share a byte; the heads of a case begin at whole ones.
    advance(view, format == KvFormat::mlx_int4 ? offset / 2 : offset, format_bytes(format, 1));
  };
  Inputs at = inputs;
  if (at.sinks != nullptr) at.sinks += head;
  if (at.alibi_slopes != nullptr) at.alibi_slopes += head;
  advance(at.q, seq * at.q.seq_stride + head * at.q.head_stride + query_idx * at.q.token_stride,
          problem.q_dtype == DType::f32 ? 4 : 2);
  to_head(at.k, problem.k_format);
  to_head(at.v, problem.v_format);
  for (TensorView* side : {&at.k_scales, &at.k_biases, &at.v_scales, &at.v_biases}) {
    to_head(*side, static_cast<KvFormat>(problem.scales_dtype));
  }
  return core::reference_attend(row, at).out;
}

// Values per unit of a stride: 32 for the block formats.
std::int64_t unit_values(KvFormat format) {
  return format == KvFormat::q8_0 || format == KvFormat::q4_0 ? shared::kGgmlBlockValues : 1;
}

TensorView packed_view(const void* data, std::int64_t heads, std::int64_t tokens, std::int64_t units) {
  return {data, heads * tokens * units, tokens * units, units};
}

// What attention needs beside q, K and V. Masks show every key, so that rows of the oracle need no part of them: a mask
// costs what its scan costs, which is what models pay in all but a few steps.
void make_score_rules(CaseData& data) {
  const Problem& problem = data.problem;
  const std::int64_t columns = problem.mask == MaskKind::tree ? problem.q_len : problem.max_kv_len;
  const bool additive = problem.mask == MaskKind::additive;
  if (problem.mask != MaskKind::none) {
    const std::int64_t entry_bytes = additive ? (problem.mask_dtype == DType::f32 ? 4 : 2) : 1;
    data.mask.assign(static_cast<std::size_t>(problem.q_len * columns * entry_bytes),
                     static_cast<std::byte>(additive ? 0 : 1));
  }
  for (std::int64_t head = 0; head < problem.num_q_heads; ++head) {
    data.per_head.push_back(std::exp2(-static_cast<float>(head % 8 + 1)));
  }
}

// Groups of a row of MLX's formats, which have a scale and a bias each; 0 of others.
std::int64_t num_groups(const Problem& problem, KvFormat format, std::int64_t dims) {
  const bool is_mlx = format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4;
  return is_mlx ? dims / problem.quant_group : 0;
}

// The f16 scales and biases at `scales` that make values as large as those of plain caches.
void write_sides(char* scales, std::int64_t side_bytes, KvFormat format) {
  const float most = format == KvFormat::mlx_int8 ? 128.0F : 8.0F;
  for (std::int64_t at = 0; at < side_bytes; at += 2) {
    const float scale = 1.0F / most * (0.5F + 0.25F * static_cast<float>(at / 2 % 3));
    const std::uint16_t stored[] = {shared::f32_to_f16(scale), shared::f32_to_f16(-scale * most)};
    std::memcpy(scales + at, &stored[0], 2);
    std::memcpy(scales + side_bytes + at, &stored[1], 2);
  }
}

// Gives every block at [data, data + bytes) an f16 scale that makes values as large as those of plain caches.
void write_scales(char* data, std::int64_t bytes, KvFormat format) {
  if (unit_values(format) == 1) return;
  const std::int64_t block_bytes = format_bytes(format, 1);
  const float largest = format == KvFormat::q8_0 ? 1.0F / 128 : 1.0F / 8;
  for (std::int64_t at = 0; at < bytes; at += block_bytes) {
    const std::uint16_t scale = shared::f32_to_f16(largest * (0.5F + 0.25F * static_cast<float>(at / block_bytes % 3)));
    std::memcpy(data + at, &scale, sizeof scale);
  }
}

}  // namespace

void ErrorSum::add(double got, double wanted) {
  difference += (got - wanted) * (got - wanted);
  total += wanted * wanted;
}

double ErrorSum::relative_rms() const {
  if (total > 0.0) return std::sqrt(difference / total);
  return difference == 0.0 ? 0.0 : std::numeric_limits<double>::infinity();
}

std::size_t out_elements(const Problem& problem) {
  return static_cast<std::size_t>(problem.num_seqs * problem.num_q_heads * problem.q_len * problem.dim_v());
}

std::vector<float> decode_values(KvFormat format, const void* stored, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(core::decode_value(format, stored, static_cast<std::int64_t>(i)));
  }
  return values;
}

double sampled_error(const CaseData& data, const std::vector<float>& out) {
  const Problem& problem = data.problem;
  ErrorSum sum;
  for (const OracleRow& row : data.oracle_rows) {
    const std::int64_t row_idx = (row.seq * problem.num_q_heads + row.head) * problem.q_len + row.query_idx;
    const float* const got = out.data() + row_idx * problem.dim_v();
    for (std::size_t d = 0; d < row.out.size(); ++d) sum.add(got[d], row.out[d]);
  }
  return sum.relative_rms();
}

Inputs CaseData::inputs(std::int64_t set) const {
  Inputs inputs;
  const char* const k = base + set * set_bytes;
  inputs.q = packed_view(q.data(), problem.num_q_heads, problem.q_len, problem.head_dim_qk);
  const std::int64_t k_units = problem.head_dim_qk / unit_values(problem.k_format);
  const std::int64_t v_units = problem.dim_v() / unit_values(problem.v_format);
  inputs.k = packed_view(k, problem.num_kv_heads, problem.max_kv_len, k_units);
  inputs.v = packed_view(k + k_bytes, problem.num_kv_heads, problem.max_kv_len, v_units);
  const char* side = k + k_bytes + v_bytes;
  const auto place_sides = [&](TensorView& scales, TensorView& biases, std::int64_t groups, std::int64_t bytes) {
    if (groups == 0) return;
    for (TensorView* view : {&scales, &biases}) {
      *view = packed_view(side, problem.num_kv_heads, problem.max_kv_len, groups);
      if (tokens_first) {
        view->head_stride = groups;
        view->token_stride = problem.num_kv_heads * groups;
      }
      side += bytes;
    }
  };
  place_sides(inputs.k_scales, inputs.k_biases, num_groups(problem, problem.k_format, problem.head_dim_qk),
              k_side_bytes);
  place_sides(inputs.v_scales, inputs.v_biases, num_groups(problem, problem.v_format, problem.dim_v()), v_side_bytes);
  if (!mask.empty()) inputs.mask = mask.data();
  inputs.mask_row_stride = problem.mask == MaskKind::tree ? problem.q_len : problem.max_kv_len;
  if (problem.has_sinks) inputs.sinks = per_head.data();
  if (problem.has_alibi) inputs.alibi_slopes = per_head.data();
  if (tokens_first) {
    inputs.k.head_stride = k_units;
    inputs.k.token_stride = problem.num_kv_heads * k_units;
    inputs.v.head_stride = v_units;
    inputs.v.token_stride = problem.num_kv_heads * v_units;
  }
  return inputs;
}

CaseData lay_out_case(const Problem& problem, std::int64_t rotation_bytes) {
  CaseData data;
  data.problem = problem;
  const std::int64_t tokens = problem.num_seqs * problem.num_kv_heads * problem.max_kv_len;
  data.k_bytes = format_bytes(problem.k_format, tokens * problem.head_dim_qk);
  data.v_bytes = format_bytes(problem.v_format, tokens * problem.dim_v());
  data.k_side_bytes = 2 * tokens * num_groups(problem, problem.k_format, problem.head_dim_qk);
  data.v_side_bytes = 2 * tokens * num_groups(problem, problem.v_format, problem.dim_v());
  data.set_bytes = std::max((data.kv_bytes() + kSetAlignment - 1) / kSetAlignment * kSetAlignment, kSetAlignment);
  // An odd number of sets: every arm of an even number of them meets every set.
  data.num_sets = std::max<std::int64_t>(1, (rotation_bytes + data.set_bytes - 1) / data.set_bytes);
  if (data.num_sets > 1) data.num_sets |= 1;
  return data;
}

void place_case(CaseData& data, const BenchBuffer& buffer) {
  for (std::int64_t set = 0; set < data.num_sets; ++set) {
    char* const k = buffer.data() + set * data.set_bytes;
    write_scales(k, data.k_bytes, data.problem.k_format);
    write_scales(k + data.k_bytes, data.v_bytes, data.problem.v_format);
    char* const sides = k + data.k_bytes + data.v_bytes;
    write_sides(sides, data.k_side_bytes, data.problem.k_format);
    write_sides(sides + 2 * data.k_side_bytes, data.v_side_bytes, data.problem.v_format);
  }
  place_case(data, buffer.data());
}

void place_case(CaseData& data, char* base) {
  data.base = base;
  const Problem& problem = data.problem;
  const std::int64_t elements = problem.num_seqs * problem.num_q_heads * problem.q_len * problem.head_dim_qk;
  const auto format = static_cast<KvFormat>(problem.q_dtype);  // the first three agree in order
  const std::int64_t bytes = (format_bytes(format, elements) + 3) / 4 * 4;
  data.q.resize(static_cast<std::size_t>(bytes));
  fill_random(data.q.data(), bytes, format, 0);
  make_score_rules(data);

  // Rows that touch the ends and the middle of every axis.
  data.oracle_rows = {{0, 0, problem.q_len - 1, {}},
                      {problem.num_seqs - 1, problem.num_q_heads - 1, 0, {}},
                      {problem.num_seqs / 2, problem.num_q_heads / 2, problem.q_len / 2, {}}};
  const Inputs inputs = data.inputs(0);
  for (OracleRow& row : data.oracle_rows) row.out = reference_row(problem, inputs, row.seq, row.head, row.query_idx);
}

}  // namespace kvonce::tool
