// What a launcher does before anything runs: parameters from the problem, grid, threadgroup memory. Memory and execution are
// run_launch.hpp's on the host and on_cuda.cu's on a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "kvonce/attend.hpp"
#include "metal/params.h"

namespace kvonce::emulation {

enum class Body : std::uint8_t { vector, matrix, per_head };
const char* to_string(Body body);

/// What of the bodies is compiled together: the template axes.
struct Instance {
  Body body;
  DType dtype;
  int head_dim_qk;
  int head_dim_v;
  int row_tile;
  int bits = 0;   // of the codes of an MLX affine cache; 0: K and V are of dtype
  int group = 0;  // values per scale and bias

  [[nodiscard]] bool operator==(const Instance&) const = default;
  [[nodiscard]] std::string name() const;
};

/// 8 or 4 for MLX's affine formats, 0 for any other.
int code_bits(KvFormat format);

/// Those of instances.def.
std::span<const Instance> instances();

/// The buffers of attend_*, in the order of src/metal/params.h, with the strides that MLX adds.
struct AttendArgs {
  const void* q;
  const void* k;
  const void* v;
  const std::int32_t* kv_lens;
  const std::int32_t* kv_starts;
  const unsigned char* mask;
  const float* alibi_slopes;
  const std::int64_t* params;
  const float* scalars;
  const std::int64_t* q_strides;
  const std::int64_t* k_strides;
  const std::int64_t* v_strides;
  const std::int64_t* mask_strides;
  float* partial_o;
  float* partial_sums;
  // Of affine caches (src/metal/affine.metal.h).
  const void* k_scales = nullptr;
  const void* k_biases = nullptr;
  const void* v_scales = nullptr;
  const void* v_biases = nullptr;
  const std::int64_t* k_scales_strides = nullptr;
  const std::int64_t* k_biases_strides = nullptr;
  const std::int64_t* v_scales_strides = nullptr;
  const std::int64_t* v_biases_strides = nullptr;
};

struct MergeArgs {
  const float* partial_o;
  const float* partial_sums;
  const float* sinks;
  const std::int64_t* params;
  void* out;
  float* lse;
};

/// A thread's place: threadgroup in the grid, simdgroup in the threadgroup, lane.
struct ThreadPlace {
  int x, y, z, simdgroup, lane;
};

/// What a policy decides.
struct Choice {
  Body body = Body::vector;
  std::int64_t row_tile = 8;
  std::int64_t row_tiles = 1;
  std::int64_t token_parts = 1;
  std::int64_t num_chunks = 1;
  std::int64_t chunk_tokens = 0;
  std::int64_t merge_simdgroups = 4;
  std::uint64_t order_seed = 1;  // of the lanes

  [[nodiscard]] std::string name() const;
};

/// Strides of a tensor in the order sequence, head, token, dim.
using Strides = std::array<std::int64_t, 4>;

/// The launch of a problem: everything but memory.
struct Launch {
  Instance instance;
  std::array<std::int64_t, kvonce_metal::kNumParams> params;
  std::array<float, kvonce_metal::kNumScalars> scalars;
  /// Order: q, k, v, mask, then k_scales, k_biases, v_scales, v_biases.
  std::array<Strides, 8> strides;
  std::int64_t num_rows;  // num_seqs * num_q_heads * q_len
  std::int64_t grid_x, grid_y, grid_z;
  std::int64_t num_simdgroups;  // of a threadgroup
  std::int64_t shared_floats;
  std::int64_t merge_simdgroups;
  std::int64_t merge_shared_floats;
  std::int64_t read_factor;

  [[nodiscard]] std::int64_t num_chunks() const { return params[kvonce_metal::kNumChunks]; }
};

/// Empty, or why the Metal bodies do not serve the problem.
std::string why_not_served(const Problem& problem);

/// Throws Error{InvalidArgument} where the choice breaks a limit of params.h, Error{Unsupported} for a problem that the bodies
/// do not serve.
Launch make_launch(const Problem& problem, const Inputs& inputs, const Choice& choice);

}  // namespace kvonce::emulation
