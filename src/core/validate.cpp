#include "core/validate.hpp"

#include <cmath>
#include <string>

#include "core/refuse.hpp"

namespace kvonce::core {
namespace {

constexpr std::int64_t kMaxHeadDim = 1024;
constexpr std::int64_t kMaxQLen = 64;
constexpr std::int64_t kMaxKvLen = 2147483647;
constexpr std::int64_t kMaxCount = 1 << 20;  // sequences and heads: keeps every product of counts within 64 bits
constexpr std::int64_t kGgmlBlock = 32;

void require_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    refuse(ErrorCode::InvalidArgument, name, std::to_string(value),
           std::to_string(low) + " to " + std::to_string(high));
  }
}

bool is_mlx(KvFormat format) { return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4; }

void require_whole_blocks(const char* name, KvFormat format, std::int64_t dim, std::int64_t quant_group) {
  const std::int64_t block = is_mlx(format)                                         ? quant_group
                             : format == KvFormat::q8_0 || format == KvFormat::q4_0 ? kGgmlBlock
                                                                                    : 1;
  if (dim % block != 0) {
    refuse(ErrorCode::InvalidArgument, name, std::to_string(dim),
           "a multiple of " + std::to_string(block) + " for format " + std::string(to_string(format)));
  }
}

void require_known_enums(const Problem& p) {
  const auto known = [](const char* name, std::string_view text) {
    if (text == "unknown")
      refuse(ErrorCode::InvalidArgument, name, "a value outside the enumeration", "its enumerators");
  };
  known("q_dtype", to_string(p.q_dtype));
  known("out_dtype", to_string(p.out_dtype));
  known("k_format", to_string(p.k_format));
  known("v_format", to_string(p.v_format));
  known("mask", to_string(p.mask));
  known("mask_dtype", to_string(p.mask_dtype));
  known("scales_dtype", to_string(p.scales_dtype));
  known("layout", to_string(p.layout));
}

}  // namespace

Problem validate(const Problem& problem) {
  Problem p = problem;
  require_known_enums(p);
  require_range("num_seqs", p.num_seqs, 0, kMaxCount);
  require_range("q_len", p.q_len, 0, kMaxQLen);
  require_range("num_q_heads", p.num_q_heads, 1, kMaxCount);
  require_range("num_kv_heads", p.num_kv_heads, 1, kMaxCount);
  if (p.num_q_heads % p.num_kv_heads != 0) {
    refuse(ErrorCode::InvalidArgument, "num_q_heads", std::to_string(p.num_q_heads),
           "a multiple of num_kv_heads = " + std::to_string(p.num_kv_heads));
  }
  require_range("head_dim_qk", p.head_dim_qk, 1, kMaxHeadDim);
  require_range("head_dim_v", p.head_dim_v, 0, kMaxHeadDim);
  p.head_dim_v = p.dim_v();
  require_range("max_kv_len", p.max_kv_len, 0, kMaxKvLen);
  require_range("window", p.window, 0, kMaxKvLen);

  if (is_mlx(p.k_format) || is_mlx(p.v_format)) {
    if (p.quant_group != 32 && p.quant_group != 64 && p.quant_group != 128) {
      refuse(ErrorCode::InvalidArgument, "quant_group", std::to_string(p.quant_group), "32, 64 or 128 for MLX formats");
    }
  } else if (p.quant_group != 0) {
    refuse(ErrorCode::InvalidArgument, "quant_group", std::to_string(p.quant_group),
           "0 unless K or V is an MLX format");
  } else if (p.scales_dtype != DType::f32) {
    refuse(ErrorCode::InvalidArgument, "scales_dtype", std::string(to_string(p.scales_dtype)),
           "f32 unless K or V is an MLX format");
  }
  require_whole_blocks("head_dim_qk", p.k_format, p.head_dim_qk, p.quant_group);
  require_whole_blocks("head_dim_v", p.v_format, p.head_dim_v, p.quant_group);

  if (p.layout == KvLayout::strided) {
    require_range("page_size", p.page_size, 0, 0);
  } else {
    require_range("page_size", p.page_size, 1, kMaxKvLen);
  }
  if (p.v_is_k_prefix && (p.v_format != p.k_format || p.head_dim_v > p.head_dim_qk)) {
    refuse(ErrorCode::InvalidArgument, "v_is_k_prefix", "true",
           "true only when v_format equals k_format and head_dim_v <= head_dim_qk");
  }

  if (!p.scale) p.scale = 1.0F / std::sqrt(static_cast<float>(p.head_dim_qk));
  if (!std::isfinite(*p.scale))
    refuse(ErrorCode::InvalidArgument, "scale", std::to_string(*p.scale), "a finite number");
  if (!std::isfinite(p.softcap) || p.softcap < 0.0F) {
    refuse(ErrorCode::InvalidArgument, "softcap", std::to_string(p.softcap), "0 (off) or a positive finite number");
  }
  if (p.mask_dtype != DType::f32 && p.mask != MaskKind::additive) {
    refuse(ErrorCode::InvalidArgument, "mask_dtype", std::string(to_string(p.mask_dtype)),
           "f32 unless the mask is additive");
  }
  if (p.has_mask_slopes && p.mask != MaskKind::additive) {
    refuse(ErrorCode::InvalidArgument, "has_mask_slopes", "true", "true only with an additive mask");
  }
  if (p.has_segments && p.layout != KvLayout::strided) {
    refuse(ErrorCode::InvalidArgument, "has_segments", "true", "true only with the strided layout");
  }
  return p;
}

}  // namespace kvonce::core
