#include "case_tensors.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "affine_codes.hpp"
#include "core/reference.hpp"
#include "generator.hpp"
#include "shared/numeric.h"
#include "shared/token_range.h"

namespace kvonce::conformance {
namespace {

constexpr unsigned char kUntouched = 0xff;
constexpr std::int64_t kSpareNaNTokens = 3;  // masks cover at least this many more positions when keys are few

KvFormat format_of(DType dtype) { return static_cast<KvFormat>(dtype); }

bool is_plain(KvFormat format) {
  return format == KvFormat::f32 || format == KvFormat::f16 || format == KvFormat::bf16;
}
bool is_mlx(KvFormat format) { return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4; }
bool is_ggml(KvFormat format) { return format == KvFormat::q8_0 || format == KvFormat::q4_0; }

// Stride units of a row: blocks for block formats, else values.
std::int64_t row_units(KvFormat format, std::int64_t dim) { return is_ggml(format) ? dim / 32 : dim; }

// A gap counts elements, of MLX's 4-bit codes whole bytes.
std::int64_t gap_units(KvFormat format) { return format == KvFormat::mlx_int4 ? 2 : 1; }

std::int64_t unit_bytes_x2(KvFormat format) {
  switch (format) {
    case KvFormat::f32:
      return 8;
    case KvFormat::f16:
    case KvFormat::bf16:
      return 4;
    case KvFormat::f8_e4m3:
    case KvFormat::mlx_int8:
      return 2;
    case KvFormat::mlx_int4:
      return 1;
    case KvFormat::q8_0:
      return 68;
    case KvFormat::q4_0:
      return 36;
  }
  return 2;
}

std::size_t bytes_of(KvFormat format, std::int64_t units) {
  return static_cast<std::size_t>(units * unit_bytes_x2(format) / 2);
}

void store_plain(KvFormat format, double value, unsigned char* at) {
  const auto x = static_cast<float>(value);
  if (format == KvFormat::f32) {
    std::memcpy(at, &x, 4);
    return;
  }
  const std::uint16_t h = format == KvFormat::f16 ? shared::f32_to_f16(x) : shared::f32_to_bf16(x);
  std::memcpy(at, &h, 2);
}

void fill_poison(GuardedBuffer& buffer, KvFormat format, Poison poison) {
  if (poison == Poison::zero) {
    buffer.fill_byte(0);
  } else if (!is_plain(format)) {
    // nan: NaN codes or NaN block scales. large: the largest fp8 value, or blocks scaled by 65504 or more.
    buffer.fill_byte(poison == Poison::nan ? 0xff : (format == KvFormat::f8_e4m3 ? 0x7e : 0x7b));
  } else {
    const double value = poison == Poison::nan     ? std::numeric_limits<double>::quiet_NaN()
                         : format == KvFormat::f16 ? 65504.0
                                                   : 1e30;
    unsigned char pattern[4] = {};
    store_plain(format, value, pattern);
    buffer.fill(pattern, bytes_of(format, 1));
  }
}

GuardedBuffer make_buffer(std::size_t bytes, std::int64_t offset_bytes) {
  if (offset_bytes < 0) return GuardedBuffer(bytes, GuardedBuffer::Place::kFlushEnd);
  return GuardedBuffer(bytes, GuardedBuffer::Place::kOffset, static_cast<std::size_t>(offset_bytes));
}

template <typename T>
GuardedBuffer copy_exact(const std::vector<T>& values) {
  GuardedBuffer buffer(values.size() * sizeof(T), GuardedBuffer::Place::kFlushEnd);
  buffer.fill_byte(0xff);
  if (!values.empty()) std::memcpy(buffer.data(), values.data(), values.size() * sizeof(T));
  return buffer;
}

// Strides of a [outer, heads, tokens, units + gap] tensor in memory and the units it occupies, without the last gap.
struct Shape {
  std::int64_t outer_stride, head_stride, token_stride, total_units;
};

Shape shape_of(std::int64_t outer, std::int64_t heads, std::int64_t tokens, std::int64_t units, std::int64_t gap,
               bool token_major, bool expand_heads) {
  const std::int64_t width = units + gap;
  const std::int64_t stored_heads = expand_heads ? 1 : heads;
  Shape shape{stored_heads * tokens * width, token_major ? width : tokens * width,
              token_major ? stored_heads * width : width, 0};
  if (expand_heads) shape.head_stride = 0;
  const std::int64_t rows = outer * stored_heads * tokens;
  shape.total_units = rows > 0 ? rows * width - gap : 0;
  return shape;
}

}  // namespace

CaseTensors::CaseTensors(const CaseSpec& spec) : spec_(spec) {
  if (!spec.kv_lens.empty()) {
    kv_lens_ = copy_exact(spec.kv_lens);
    inputs_.kv_lens = reinterpret_cast<const std::int32_t*>(kv_lens_.data());
  }
  if (!spec.kv_starts.empty()) {
    kv_starts_ = copy_exact(spec.kv_starts);
    inputs_.kv_starts = reinterpret_cast<const std::int32_t*>(kv_starts_.data());
  }
  if (spec.problem.has_segments) {
    inputs_.segments = spec.segments.data();
    inputs_.num_segments = static_cast<std::int64_t>(spec.segments.size());
  }
  make_q();
  if (spec.problem.layout != KvLayout::strided) make_pages();
  make_cache(true);
  if (spec.problem.v_is_k_prefix) {
    inputs_.v = inputs_.k;
    inputs_.v_scales = inputs_.k_scales;
    inputs_.v_biases = inputs_.k_biases;
  } else {
    make_cache(false);
  }
  make_mask();
  make_per_head();
  make_outputs();
}

void CaseTensors::make_q() {
  const Problem& p = spec_.problem;
  const KvFormat format = format_of(p.q_dtype);
  const Shape shape = shape_of(p.num_seqs, p.num_q_heads, p.q_len + spec_.q.spare_tokens, p.head_dim_qk,
                               spec_.q.row_gap, spec_.q.token_major, false);
  q_ = make_buffer(bytes_of(format, shape.total_units), spec_.q.offset_bytes);
  fill_poison(q_, format, spec_.poison);
  std::uint64_t i = 0;
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (std::int64_t head = 0; head < p.num_q_heads; ++head) {
      for (std::int64_t token = 0; token < p.q_len; ++token) {
        const std::int64_t at = seq * shape.outer_stride + head * shape.head_stride + token * shape.token_stride;
        for (std::int64_t dim = 0; dim < p.head_dim_qk; ++dim) {
          const double x = spec_.q_value ? spec_.q_value(seq, head, token, dim) : normal_value(spec_.seed * 4, i++);
          store_plain(format, x, q_.data() + bytes_of(format, at + dim));
        }
      }
    }
  }
  inputs_.q = {q_.data(), shape.outer_stride, shape.head_stride, shape.token_stride};
}

// Per K/V sequence, the tokens that some row may read.
std::vector<std::vector<std::int64_t>> CaseTensors::valid_tokens() const {
  const Problem& p = spec_.problem;
  std::vector<std::vector<std::int64_t>> tokens(static_cast<std::size_t>(p.num_seqs));
  if (p.has_segments) {
    for (const Segment& segment : spec_.segments) {
      auto& list = tokens[static_cast<std::size_t>(segment.kv_seq)];
      for (std::int64_t t = segment.token_begin; t < segment.token_end; ++t) list.push_back(t);
    }
    return tokens;
  }
  for (std::size_t seq = 0; seq < tokens.size(); ++seq) {
    const std::int64_t kv_len = spec_.kv_lens.empty() ? p.max_kv_len : spec_.kv_lens[seq];
    const std::int64_t kv_start = spec_.kv_starts.empty() ? 0 : spec_.kv_starts[seq];
    if (p.q_len == 0) continue;
    const auto first = shared::visible_range(0, p.q_len, kv_len, kv_start, p.causal, p.window);
    const auto last = shared::visible_range(p.q_len - 1, p.q_len, kv_len, kv_start, p.causal, p.window);
    for (std::int64_t t = first.begin; t < last.end; ++t) tokens[seq].push_back(t);
  }
  return tokens;
}

// A block table of shuffled pages with a row pitch larger than needed: the entries past a sequence's pages name a page
// that belongs to nobody and is full of poison. The last row ends where its last page does.
void CaseTensors::make_pages() {
  const Problem& p = spec_.problem;
  std::vector<std::int64_t> needed;
  std::int64_t total = 0;
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    const std::int64_t kv_len = spec_.kv_lens.empty() ? p.max_kv_len : spec_.kv_lens[static_cast<std::size_t>(seq)];
    needed.push_back(shared::ceil_div(kv_len, p.page_size));
    total += needed.back();
  }
  std::vector<std::int32_t> order;
  for (std::int64_t page = 1; page <= total; ++page) order.push_back(static_cast<std::int32_t>(page));
  Random random(spec_.seed + 77);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  const std::int64_t pitch = shared::ceil_div(p.max_kv_len, p.page_size) + 2;
  std::vector<std::int32_t> table(
      static_cast<std::size_t>(p.num_seqs > 0 ? (p.num_seqs - 1) * pitch + needed.back() : 0), 0);
  std::size_t next = 0;
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (std::int64_t i = 0; i < needed[static_cast<std::size_t>(seq)]; ++i) {
      table[static_cast<std::size_t>(seq * pitch + i)] = order[next++];
    }
  }
  block_table_ = copy_exact(table);
  inputs_.block_table = reinterpret_cast<const std::int32_t*>(block_table_.data());
  inputs_.block_table_stride = pitch;
  inputs_.num_pages = total + 1;  // page 0 is nobody's
}

void CaseTensors::make_cache(bool is_k) {
  const Problem& p = spec_.problem;
  const TensorLayout& layout = is_k ? spec_.k : spec_.v;
  const ValueFn& value = is_k ? spec_.k_value : spec_.v_value;
  const KvFormat format = is_k ? p.k_format : p.v_format;
  const std::int64_t dim = is_k ? p.head_dim_qk : p.dim_v();
  const bool paged = p.layout != KvLayout::strided;
  const std::int64_t group = is_mlx(format) ? p.quant_group : 1;
  const std::int64_t tokens = paged ? p.page_size : p.max_kv_len + layout.spare_tokens;
  const std::int64_t outer = paged ? inputs_.num_pages : p.num_seqs;
  const bool token_major = paged ? p.layout == KvLayout::paged_nhd : layout.token_major;
  const Shape shape = shape_of(outer, p.num_kv_heads, tokens, row_units(format, dim),
                               layout.row_gap * gap_units(format), token_major, layout.expand_heads);
  // Scales and biases are laid out apart from the codes: whatever the codes' gaps, theirs differ from each other's.
  const KvFormat side_format = format_of(p.scales_dtype);
  const std::int64_t num_groups = is_mlx(format) ? dim / group : 0;
  const auto side_shape = [&](std::int64_t gap) {
    return shape_of(outer, p.num_kv_heads, tokens, num_groups, gap, token_major, layout.expand_heads);
  };
  const Shape scales_shape = side_shape(layout.row_gap > 0 ? 1 : 0);
  const Shape biases_shape = side_shape(layout.row_gap > 0 ? 3 : 0);
  GuardedBuffer& buffer = is_k ? k_ : v_;
  GuardedBuffer& scales = is_k ? k_scales_ : v_scales_;
  GuardedBuffer& biases = is_k ? k_biases_ : v_biases_;
  buffer = make_buffer(bytes_of(format, shape.total_units), layout.offset_bytes);
  fill_poison(buffer, format, spec_.poison);
  if (is_mlx(format)) {
    scales = make_buffer(bytes_of(side_format, scales_shape.total_units), -1);
    biases = make_buffer(bytes_of(side_format, biases_shape.total_units), -1);
    fill_poison(scales, side_format, spec_.poison);
    fill_poison(biases, side_format, spec_.poison);
  } else if (format == KvFormat::f8_e4m3) {
    std::vector<float> per_head;
    for (std::int64_t head = 0; head < p.num_kv_heads; ++head) {
      per_head.push_back(std::ldexp(1.0F / 128.0F, static_cast<int>(is_k ? head % 3 : -(head % 3))));
    }
    scales = copy_exact(per_head);
  }

  const auto valid = valid_tokens();
  const std::int64_t stored_heads = layout.expand_heads ? 1 : p.num_kv_heads;
  const std::uint64_t seed = spec_.seed * 4 + (is_k ? 1 : 2);
  std::uint64_t i = 0;
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (std::int64_t head = 0; head < stored_heads; ++head) {
      for (const std::int64_t token : valid[static_cast<std::size_t>(seq)]) {
        std::int64_t outer_idx = seq;
        std::int64_t token_idx = token;
        if (paged) {
          outer_idx = inputs_.block_table[seq * inputs_.block_table_stride + token / p.page_size];
          token_idx = token % p.page_size;
        }
        const auto offset_in = [&](const Shape& s) {
          return outer_idx * s.outer_stride + head * s.head_stride + token_idx * s.token_stride;
        };
        unsigned char* row = buffer.data() + bytes_of(format, offset_in(shape));
        if (is_plain(format)) {
          for (std::int64_t d = 0; d < dim; ++d) {
            store_plain(format, value ? value(seq, head, token, d) : normal_value(seed, i++),
                        row + bytes_of(format, d));
          }
          continue;
        }
        // Quantised: random codes; scales chosen so that values are about as large as the plain ones.
        const std::size_t row_bytes = bytes_of(format, row_units(format, dim));
        for (std::size_t b = 0; b < row_bytes; ++b) {
          row[b] = static_cast<unsigned char>(splitmix64((seed << 32) + i++));
          if (format == KvFormat::f8_e4m3 && (row[b] & 0x7f) == 0x7f) row[b] = 0;
        }
        const double full_scale = format == KvFormat::q8_0 || format == KvFormat::mlx_int8 ? 3.0 / 128 : 3.0 / 8;
        for (std::int64_t block = 0; is_ggml(format) && block < dim / 32; ++block) {
          store_plain(KvFormat::f16, full_scale * (0.5 + 0.25 * static_cast<double>(i++ % 3)),
                      row + bytes_of(format, block));
        }
        for (std::int64_t g = 0; g < num_groups; ++g) {
          const double scale = full_scale * (0.5 + 0.25 * static_cast<double>(i++ % 3));
          AffineLevels levels{scale, -scale * (format == KvFormat::mlx_int8 ? 128 : 8)};
          if (value) {
            std::vector<double> values;
            for (std::int64_t d = g * group; d < (g + 1) * group; ++d) values.push_back(value(seq, head, token, d));
            levels = write_codes(format, values, g * group, row);
          }
          store_plain(side_format, levels.scale, scales.data() + bytes_of(side_format, offset_in(scales_shape) + g));
          store_plain(side_format, levels.bias, biases.data() + bytes_of(side_format, offset_in(biases_shape) + g));
        }
      }
    }
  }
  (is_k ? inputs_.k : inputs_.v) = TensorView{buffer.data(), shape.outer_stride, shape.head_stride, shape.token_stride};
  const auto view = [](const GuardedBuffer& side, const Shape& s) {
    return TensorView{side.data(), s.outer_stride, s.head_stride, s.token_stride};
  };
  if (scales.data() != nullptr) (is_k ? inputs_.k_scales : inputs_.v_scales) = view(scales, scales_shape);
  if (biases.data() != nullptr) (is_k ? inputs_.k_biases : inputs_.v_biases) = view(biases, biases_shape);
}

void CaseTensors::make_mask() {
  const Problem& p = spec_.problem;
  if (p.mask == MaskKind::none) return;
  const bool tree = p.mask == MaskKind::tree;
  const bool additive = p.mask == MaskKind::additive;
  std::int64_t num_keys = p.max_kv_len;
  if (p.has_segments) {
    for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
      std::int64_t keys = 0;
      for (const Segment& s : spec_.segments) {
        if (seq >= s.seq_begin && seq < s.seq_end) keys += s.token_end - s.token_begin;
      }
      num_keys = std::max(num_keys, keys);
    }
  }
  // Trees have no heads and never broadcast. The mask of fewer keys than kSpareNaNTokens is longer than the keys are.
  const std::int64_t columns = tree ? p.q_len : std::max(num_keys, kSpareNaNTokens);
  const MaskLayout& layout = spec_.mask;
  const std::int64_t seqs = layout.one_seq ? std::min<std::int64_t>(p.num_seqs, 1) : p.num_seqs;
  const std::int64_t heads = tree || layout.one_head ? 1 : p.num_q_heads;
  const std::int64_t rows = layout.one_row ? std::min<std::int64_t>(p.q_len, 1) : p.q_len;
  const std::int64_t pitch = 1 + layout.token_gap;
  const std::size_t bytes = additive ? bytes_of(format_of(p.mask_dtype), 1) : 1;
  const std::int64_t entries = seqs * heads * rows * columns * pitch;
  mask_ = make_buffer(static_cast<std::size_t>(entries) * bytes, -1);
  mask_.fill_byte(0xff);  // NaN, or a key that is shown
  Random random(spec_.seed + 99);
  for (std::int64_t i = 0; i < seqs * heads * rows * columns; ++i) {
    const std::int64_t key = i % columns;
    const std::int64_t row = i / columns % rows;
    const std::int64_t head = i / columns / rows % heads;
    const std::int64_t seq = i / columns / rows / heads;
    const bool hide = tree ? key > row || (key < row && random.below(3) == 0) : random.below(3) == 0;
    double x = hide ? 0.0 : 1.0;
    if (additive && hide) x = -std::numeric_limits<double>::infinity();
    if (additive && !hide) x = normal_value(spec_.seed * 4 + 3, random.next() & 0xffffffU);
    if (spec_.mask_value) x = spec_.mask_value(seq, head, row, key);
    unsigned char* const at = mask_.data() + static_cast<std::size_t>(i * pitch) * bytes;
    if (additive) {
      store_plain(format_of(p.mask_dtype), x, at);
    } else {
      *at = x != 0.0 ? 1 : 0;
    }
  }
  inputs_.mask = mask_.data();
  inputs_.mask_token_stride = pitch;
  inputs_.mask_row_stride = layout.one_row ? 0 : columns * pitch;
  inputs_.mask_head_stride = heads == 1 ? 0 : rows * columns * pitch;
  inputs_.mask_seq_stride = layout.one_seq ? 0 : heads * rows * columns * pitch;
}

void CaseTensors::make_per_head() {
  const Problem& p = spec_.problem;
  const auto make = [&p](bool wanted, const std::vector<float>& given, float first, float step, GuardedBuffer& buffer,
                         const float*& pointer) {
    if (!wanted) return;
    std::vector<float> values = given;
    for (std::int64_t head = 0; given.empty() && head < p.num_q_heads; ++head) {
      values.push_back(first + step * static_cast<float>(head % 7));
    }
    buffer = copy_exact(values);
    pointer = reinterpret_cast<const float*>(buffer.data());
  };
  make(p.has_sinks, spec_.sinks, 1.0F, 0.5F, sinks_, inputs_.sinks);
  make(p.has_alibi, spec_.alibi_slopes, 0.0625F, 0.125F, alibi_slopes_, inputs_.alibi_slopes);
  make(p.has_mask_slopes, spec_.mask_slopes, 0.25F, 0.25F, mask_slopes_, inputs_.mask_slopes);
}

void CaseTensors::make_outputs() {
  const Problem& p = spec_.problem;
  const KvFormat format = format_of(p.out_dtype);
  const Shape shape = shape_of(p.num_seqs, p.num_q_heads, p.q_len + spec_.out.spare_tokens, p.dim_v(),
                               spec_.out.row_gap, spec_.out.token_major, false);
  out_ = make_buffer(bytes_of(format, shape.total_units), spec_.out.offset_bytes);
  outputs_.out = out_.data();
  outputs_.out_seq_stride = shape.outer_stride;
  outputs_.out_head_stride = shape.head_stride;
  outputs_.out_token_stride = shape.token_stride;
  if (spec_.want_lse) {
    const std::int64_t gap = spec_.out.row_gap > 0 ? 1 : 0;
    const Shape lse = shape_of(p.num_seqs, p.num_q_heads, p.q_len, 1, gap, spec_.out.token_major, false);
    lse_ = GuardedBuffer(static_cast<std::size_t>(4 * lse.total_units), GuardedBuffer::Place::kFlushEnd);
    outputs_.lse = reinterpret_cast<float*>(lse_.data());
    outputs_.lse_seq_stride = lse.outer_stride;
    outputs_.lse_head_stride = lse.head_stride;
    outputs_.lse_token_stride = lse.token_stride;
  }
  reset_outputs();
}

std::vector<const GuardedBuffer*> CaseTensors::input_buffers() const {
  std::vector<const GuardedBuffer*> buffers;
  for (const GuardedBuffer* buffer : {&q_, &k_, &v_, &mask_, &k_scales_, &k_biases_, &v_scales_, &v_biases_, &sinks_,
                                      &alibi_slopes_, &mask_slopes_, &block_table_, &kv_lens_, &kv_starts_}) {
    if (buffer->mapped_bytes() > 0) buffers.push_back(buffer);
  }
  return buffers;
}

std::vector<GuardedBuffer*> CaseTensors::output_buffers() {
  std::vector<GuardedBuffer*> buffers = {&out_};
  if (spec_.want_lse) buffers.push_back(&lse_);
  return buffers;
}

void CaseTensors::reset_outputs() {
  out_.fill_byte(kUntouched);
  if (spec_.want_lse) lse_.fill_byte(kUntouched);
}

std::string CaseTensors::stray_writes() const {
  const Problem& p = spec_.problem;
  if (!out_.margins_are(kUntouched)) return "bytes around out were written";
  if (spec_.want_lse && !lse_.margins_are(kUntouched)) return "bytes around lse were written";
  const std::size_t unit = bytes_of(format_of(p.out_dtype), 1);
  std::vector<bool> is_out(out_.bytes(), false);
  std::vector<bool> is_lse(spec_.want_lse ? lse_.bytes() / 4 : 0, false);
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (std::int64_t head = 0; head < p.num_q_heads; ++head) {
      for (std::int64_t row = 0; row < p.q_len; ++row) {
        const std::int64_t at =
            seq * outputs_.out_seq_stride + head * outputs_.out_head_stride + row * outputs_.out_token_stride;
        const auto begin = is_out.begin() + at * static_cast<std::int64_t>(unit);
        std::fill(begin, begin + p.dim_v() * static_cast<std::int64_t>(unit), true);
        if (!spec_.want_lse) continue;
        is_lse[static_cast<std::size_t>(seq * outputs_.lse_seq_stride + head * outputs_.lse_head_stride +
                                        row * outputs_.lse_token_stride)] = true;
      }
    }
  }
  for (std::size_t i = 0; i < is_out.size(); ++i) {
    if (!is_out[i] && out_.data()[i] != kUntouched) return "byte " + std::to_string(i) + " in a gap of out was written";
  }
  for (std::size_t i = 0; i < is_lse.size(); ++i) {
    if (!is_lse[i] && lse_.data()[4 * i] != kUntouched) return "a gap of lse was written";
  }
  return {};
}

double CaseTensors::out_value(std::int64_t seq, std::int64_t head, std::int64_t row, std::int64_t dim) const {
  const std::int64_t at =
      seq * outputs_.out_seq_stride + head * outputs_.out_head_stride + row * outputs_.out_token_stride + dim;
  return core::decode_value(format_of(spec_.problem.out_dtype), out_.data(), at);
}

double CaseTensors::lse_value(std::int64_t seq, std::int64_t head, std::int64_t row) const {
  return static_cast<double>(
      outputs_.lse[seq * outputs_.lse_seq_stride + head * outputs_.lse_head_stride + row * outputs_.lse_token_stride]);
}

std::vector<unsigned char> CaseTensors::result_bytes() const {
  const Problem& p = spec_.problem;
  const std::size_t row_bytes = bytes_of(format_of(p.out_dtype), p.dim_v());
  std::vector<unsigned char> bytes;
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (std::int64_t head = 0; head < p.num_q_heads; ++head) {
      for (std::int64_t row = 0; row < p.q_len; ++row) {
        const unsigned char* at = out_.data() + bytes_of(format_of(p.out_dtype), seq * outputs_.out_seq_stride +
                                                                                     head * outputs_.out_head_stride +
                                                                                     row * outputs_.out_token_stride);
        bytes.insert(bytes.end(), at, at + row_bytes);
        if (!spec_.want_lse) continue;
        const auto lse = static_cast<float>(lse_value(seq, head, row));
        const auto* lse_bytes = reinterpret_cast<const unsigned char*>(&lse);
        bytes.insert(bytes.end(), lse_bytes, lse_bytes + 4);
      }
    }
  }
  return bytes;
}

}  // namespace kvonce::conformance
