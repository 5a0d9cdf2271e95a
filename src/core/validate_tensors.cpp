#include <string>
#include <utility>

#include "core/refuse.hpp"
#include "core/validate.hpp"

namespace kvonce::core {
namespace {

void require_pointer(const char* name, const void* pointer, const char* why) {
  if (pointer == nullptr) refuse(ErrorCode::InvalidArgument, name, "null", std::string("a pointer (") + why + ")");
}

/// A tensor the problem did not announce is an argument that would be ignored: refuse it.
void require_announced(const char* name, const void* pointer, bool announced, const char* by) {
  if (announced) {
    require_pointer(name, pointer, by);
  } else if (pointer != nullptr) {
    refuse(ErrorCode::InvalidArgument, name, "a pointer", std::string("null unless the problem sets ") + by);
  }
}

std::string at(const char* name, std::int64_t idx) { return std::string(name) + "[" + std::to_string(idx) + "]"; }

void validate_segments(const Problem& p, const Inputs& in) {
  if (in.num_segments < 0) refuse(ErrorCode::InvalidArgument, "num_segments", std::to_string(in.num_segments), ">= 0");
  for (std::int64_t i = 0; i < in.num_segments; ++i) {
    const Segment& segment = in.segments[i];
    if (segment.seq_begin < 0 || segment.seq_end < segment.seq_begin || segment.seq_end > p.num_seqs) {
      refuse(ErrorCode::InvalidArgument, at("segments", i) + ".seq_begin/seq_end",
             std::to_string(segment.seq_begin) + ".." + std::to_string(segment.seq_end),
             "an increasing range within 0.." + std::to_string(p.num_seqs));
    }
    if (segment.kv_seq < 0 || segment.kv_seq >= p.num_seqs) {
      refuse(ErrorCode::InvalidArgument, at("segments", i) + ".kv_seq", std::to_string(segment.kv_seq),
             "0 to num_seqs - 1 = " + std::to_string(p.num_seqs - 1));
    }
    if (segment.token_begin < 0 || segment.token_end < segment.token_begin || segment.token_end > p.max_kv_len) {
      refuse(ErrorCode::InvalidArgument, at("segments", i) + ".token_begin/token_end",
             std::to_string(segment.token_begin) + ".." + std::to_string(segment.token_end),
             "an increasing range within 0..max_kv_len = " + std::to_string(p.max_kv_len));
    }
  }
}

bool needs_scales(KvFormat format) {
  return format == KvFormat::f8_e4m3 || format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4;
}

bool needs_biases(KvFormat format) { return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4; }

/// A row begins at a whole byte.
void require_whole_bytes(const char* name, KvFormat format, const TensorView& tensor) {
  if (format != KvFormat::mlx_int4) return;
  for (const auto& [stride, axis] :
       {std::pair{tensor.seq_stride, ".seq_stride"}, std::pair{tensor.head_stride, ".head_stride"},
        std::pair{tensor.token_stride, ".token_stride"}}) {
    if (stride % 2 != 0) {
      refuse(ErrorCode::InvalidArgument, std::string(name) + axis, std::to_string(stride),
             "an even number: mlx_int4 has two values in a byte");
    }
  }
}

bool is_same(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.seq_stride == b.seq_stride && a.head_stride == b.head_stride &&
         a.token_stride == b.token_stride;
}

}  // namespace

void validate_inputs(const Problem& p, const Inputs& in) {
  const bool has_rows = p.num_seqs > 0 && p.q_len > 0;
  if (in.kv_len < -1 || in.kv_len > p.max_kv_len) {
    refuse(ErrorCode::InvalidArgument, "kv_len", std::to_string(in.kv_len),
           "0 to max_kv_len = " + std::to_string(p.max_kv_len) + ", or -1 for that");
  }
  const bool has_keys = has_rows && most_tokens(p, in) > 0;
  if (has_rows) require_pointer("q.data", in.q.data, "num_seqs and q_len are positive");
  if (has_keys) {
    require_pointer("k.data", in.k.data, "there are keys");
    require_pointer("v.data", in.v.data, "there are keys");
  }
  if (has_keys && p.v_is_k_prefix) {
    const auto require_same = [](const char* v_name, const TensorView& v, const char* k_name, const TensorView& k) {
      if (is_same(v, k)) return;
      refuse(ErrorCode::InvalidArgument, v_name, std::string("a tensor other than ") + k_name,
             std::string(k_name) + " itself, as the problem sets v_is_k_prefix");
    };
    require_same("v", in.v, "k", in.k);
    require_same("v_scales", in.v_scales, "k_scales", in.k_scales);
    require_same("v_biases", in.v_biases, "k_biases", in.k_biases);
  }
  if (has_keys) {
    require_whole_bytes("k", p.k_format, in.k);
    require_whole_bytes("v", p.v_format, in.v);
  }
  if (p.mask == MaskKind::none || has_keys) require_announced("mask", in.mask, p.mask != MaskKind::none, "mask");
  require_announced("sinks", in.sinks, p.has_sinks, "has_sinks");
  require_announced("alibi_slopes", in.alibi_slopes, p.has_alibi, "has_alibi");
  require_announced("mask_slopes", in.mask_slopes, p.has_mask_slopes, "has_mask_slopes");
  require_announced("block_table", in.block_table, p.layout != KvLayout::strided && has_keys, "a paged layout");
  const auto require_side = [has_keys](const char* name, const TensorView& side, bool needed, const char* by) {
    if (has_keys || !needed) require_announced(name, side.data, needed, by);
  };
  require_side("k_scales", in.k_scales, needs_scales(p.k_format), "a k_format with scales");
  require_side("v_scales", in.v_scales, needs_scales(p.v_format), "a v_format with scales");
  require_side("k_biases", in.k_biases, needs_biases(p.k_format), "an MLX k_format");
  require_side("v_biases", in.v_biases, needs_biases(p.v_format), "an MLX v_format");
  require_announced("segments", in.segments, p.has_segments && in.num_segments > 0, "has_segments");
}

void validate_lengths(const Problem& p, const Inputs& in) {
  if (p.has_segments) validate_segments(p, in);
  if (p.q_len == 0) return;
  const std::int64_t most = most_tokens(p, in);
  for (std::int64_t s = 0; s < p.num_seqs; ++s) {
    const std::int64_t kv_len = in.kv_lens != nullptr ? in.kv_lens[s] : most;
    if (kv_len < 0 || kv_len > most) {
      refuse(ErrorCode::InvalidArgument, at("kv_lens", s), std::to_string(kv_len),
             std::string(most < p.max_kv_len ? "0 to kv_len = " : "0 to max_kv_len = ") + std::to_string(most));
    }
    if (in.kv_starts != nullptr && (in.kv_starts[s] < 0 || in.kv_starts[s] > kv_len)) {
      refuse(ErrorCode::InvalidArgument, at("kv_starts", s), std::to_string(in.kv_starts[s]),
             "0 to kv_len = " + std::to_string(kv_len));
    }
    if (p.layout != KvLayout::strided) {
      const std::int64_t pages = (kv_len + p.page_size - 1) / p.page_size;
      if (pages > in.block_table_stride && p.num_seqs > 1) {
        refuse(ErrorCode::InvalidArgument, "block_table_stride", std::to_string(in.block_table_stride),
               "at least " + std::to_string(pages) + " pages for " + at("kv_lens", s));
      }
      for (std::int64_t i = 0; i < pages; ++i) {
        const std::int64_t page = in.block_table[s * in.block_table_stride + i];
        if (page < 0 || page >= in.num_pages) {
          refuse(ErrorCode::InvalidArgument, at("block_table", s * in.block_table_stride + i), std::to_string(page),
                 "0 to num_pages - 1 = " + std::to_string(in.num_pages - 1));
        }
      }
    }
  }
}

void validate_outputs(const Problem& p, const Outputs& outputs) {
  if (p.num_seqs > 0 && p.q_len > 0) require_pointer("out", outputs.out, "num_seqs and q_len are positive");
}

}  // namespace kvonce::core
