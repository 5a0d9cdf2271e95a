#include "launch.hpp"

#include <algorithm>
#include <cmath>

#include "shared/token_range.h"

namespace kvonce::emulation {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::InvalidArgument, message);
}

// What a staged value takes.
std::int64_t element_bytes(const Problem& p) { return p.q_dtype == DType::f32 || code_bits(p.k_format) > 0 ? 4 : 2; }

// Strides of a tensor of codes in uint32, of any other in elements.
Strides strides_of(const TensorView& view, int bits) {
  const auto in_words = [bits](std::int64_t stride) {
    if (bits == 0) return stride;
    require(stride * bits % 32 == 0, "rows of codes are whole 32-bit words");
    return stride * bits / 32;
  };
  return {in_words(view.seq_stride), in_words(view.head_stride), in_words(view.token_stride), 1};
}

// The types' names in instances.def.
constexpr DType half = DType::f16;
constexpr DType bfloat = DType::bf16;
#define float DType::f32
constexpr Instance kInstances[] = {
#define KVONCE_METAL_VECTOR(T, qk, v, rows) {Body::vector, T, qk, v, rows},
#define KVONCE_METAL_OTHER(T, qk, v) \
  {Body::matrix, T, qk, v, 8}, {Body::per_head, T, qk, v, 1}, {Body::vector, T, qk, v, 8},
#define KVONCE_METAL_DIMS(qk, v) KVONCE_METAL_OTHER(half, qk, v){Body::vector, half, qk, v, 4},
#define KVONCE_METAL_AFFINE(T, qk, v, rows, bits, group) \
  {Body::vector, T, qk, v, rows, bits, group}, {Body::matrix, T, qk, v, 8, bits, group},
#include "instances.def"
};
#undef float

}  // namespace

const char* to_string(Body body) {
  return body == Body::vector ? "vector" : body == Body::matrix ? "matrix" : "per_head";
}

std::string Instance::name() const {
  return std::string(to_string(body)) + "_" + std::string(kvonce::to_string(dtype)) + "_d" +
         std::to_string(head_dim_qk) + "x" + std::to_string(head_dim_v) + "_r" + std::to_string(row_tile) +
         (bits > 0 ? "_q" + std::to_string(bits) + "g" + std::to_string(group) : "");
}

int code_bits(KvFormat format) { return format == KvFormat::mlx_int8 ? 8 : format == KvFormat::mlx_int4 ? 4 : 0; }

std::span<const Instance> instances() { return kInstances; }

std::string Choice::name() const {
  return std::string(to_string(body)) + " rows=" + std::to_string(row_tile) + "x" + std::to_string(row_tiles) +
         " parts=" + std::to_string(token_parts) + " chunks=" + std::to_string(num_chunks) +
         " chunk_tokens=" + std::to_string(chunk_tokens);
}

std::string why_not_served(const Problem& p) {
  const bool one_type = code_bits(p.k_format) > 0 ? p.scales_dtype == p.q_dtype
                                                  : static_cast<int>(p.q_dtype) == static_cast<int>(p.k_format);
  if (!one_type || p.k_format != p.v_format || p.out_dtype != p.q_dtype) return "q, K, V and out differ in type";
  if (code_bits(p.k_format) > 0 && (p.head_dim_qk % 64 != 0 || p.dim_v() % 64 != 0)) return "affine head dims";
  if (p.layout != KvLayout::strided) return "paged";
  if (p.mask == MaskKind::tree) return "tree mask";
  if (p.has_mask_slopes) return "mask slopes";
  if (p.has_segments) return "segments";
  if (p.mask == MaskKind::additive && p.mask_dtype != p.q_dtype && p.mask_dtype != DType::f32) {
    return "an additive mask of another 16-bit type";
  }
  if (p.num_seqs == 0 || p.q_len == 0) return "no rows";
  return {};
}

Launch make_launch(const Problem& p, const Inputs& inputs, const Choice& choice) {
  const std::string unserved = why_not_served(p);
  if (!unserved.empty()) throw Error(ErrorCode::Unsupported, "the Metal bodies do not serve: " + unserved);
  require(choice.row_tiles == 1 || choice.token_parts == 1, "row_tiles and token_parts: one of them must be 1");
  require(choice.num_chunks >= 1 && choice.merge_simdgroups >= 1 &&
              choice.merge_simdgroups <= kvonce_metal::kMaxMergeSimdgroups,
          "num_chunks or merge_simdgroups is out of range");
  const bool per_head = choice.body == Body::per_head;
  const bool matrix = choice.body == Body::matrix;
  Launch launch{};
  launch.instance = {choice.body,
                     p.q_dtype,
                     static_cast<int>(p.head_dim_qk),
                     static_cast<int>(p.dim_v()),
                     static_cast<int>(choice.row_tile),
                     code_bits(p.k_format),
                     static_cast<int>(p.quant_group)};
  if (!per_head) {
    require(choice.row_tiles <= kvonce_metal::kMaxRowTiles && choice.token_parts <= kvonce_metal::kMaxTokenParts &&
                (choice.token_parts == 1 || choice.token_parts * p.dim_v() <= kvonce_metal::kJoinFloats),
            "row_tiles or token_parts is over its limit");
    const auto as_int = [](std::int64_t x) { return static_cast<int>(x); };
    launch.shared_floats =
        kvonce_metal::shared_floats(matrix, as_int(choice.row_tile), as_int(p.head_dim_qk), as_int(p.dim_v()),
                                    as_int(element_bytes(p)), as_int(choice.row_tiles), as_int(choice.token_parts));
    require(launch.shared_floats * 4 <= kvonce_metal::kMaxSharedBytes, "too much threadgroup memory");
  } else {
    require(choice.token_parts == 1 && choice.row_tiles <= 32, "per_head: token_parts is 1 and row_tiles up to 32");
    launch.shared_floats = 1;
  }

  auto& params = launch.params;
  params[kvonce_metal::kNumSeqs] = p.num_seqs;
  params[kvonce_metal::kNumQHeads] = p.num_q_heads;
  params[kvonce_metal::kNumKvHeads] = p.num_kv_heads;
  params[kvonce_metal::kQLen] = p.q_len;
  params[kvonce_metal::kKvLen] = inputs.kv_len < 0 ? p.max_kv_len : inputs.kv_len;
  params[kvonce_metal::kNumChunks] = choice.num_chunks;
  params[kvonce_metal::kChunkTokens] = choice.chunk_tokens;
  params[kvonce_metal::kRowTiles] = choice.row_tiles;
  params[kvonce_metal::kTokenParts] = choice.token_parts;
  params[kvonce_metal::kCausal] = p.causal ? 1 : 0;
  params[kvonce_metal::kWindow] = p.window;
  params[kvonce_metal::kMaskKind] = p.mask == MaskKind::none      ? kvonce_metal::kMaskNone
                                    : p.mask == MaskKind::boolean ? kvonce_metal::kMaskBoolean
                                    : p.mask_dtype == DType::f32  ? kvonce_metal::kMaskAdditiveF32
                                                                  : kvonce_metal::kMaskAdditive;
  params[kvonce_metal::kHasKvLens] = inputs.kv_lens != nullptr ? 1 : 0;
  params[kvonce_metal::kHasKvStarts] = inputs.kv_starts != nullptr ? 1 : 0;
  params[kvonce_metal::kHasSinks] = p.has_sinks ? 1 : 0;
  params[kvonce_metal::kHasAlibi] = p.has_alibi ? 1 : 0;
  params[kvonce_metal::kMergeSimdgroups] = choice.merge_simdgroups;
  launch.scalars[kvonce_metal::kScale] = p.scale.value_or(1.0F / std::sqrt(static_cast<float>(p.head_dim_qk)));
  launch.scalars[kvonce_metal::kSoftcap] = p.softcap;

  const int bits = code_bits(p.k_format);
  launch.strides = {
      strides_of(inputs.q, 0),
      strides_of(inputs.k, bits),
      strides_of(inputs.v, bits),
      Strides{inputs.mask_seq_stride, inputs.mask_head_stride, inputs.mask_row_stride, inputs.mask_token_stride},
      strides_of(inputs.k_scales, 0),
      strides_of(inputs.k_biases, 0),
      strides_of(inputs.v_scales, 0),
      strides_of(inputs.v_biases, 0)};

  const std::int64_t rows = p.rows_per_stream();
  const std::int64_t row_blocks = shared::ceil_div(rows, choice.row_tile * choice.row_tiles);
  launch.num_rows = p.num_seqs * p.num_q_heads * p.q_len;
  launch.grid_x = choice.num_chunks;
  launch.grid_y = p.num_kv_heads * row_blocks;
  launch.grid_z = p.num_seqs;
  launch.num_simdgroups = std::max(choice.row_tiles, choice.token_parts);
  launch.merge_simdgroups = choice.merge_simdgroups;
  launch.merge_shared_floats =
      kvonce_metal::merge_shared_floats(static_cast<int>(choice.merge_simdgroups), static_cast<int>(p.dim_v()));
  launch.read_factor = per_head ? rows : row_blocks;
  return launch;
}

}  // namespace kvonce::emulation
