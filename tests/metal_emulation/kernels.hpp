// The compiled instances of the kernel bodies, without their types.
#pragma once

#include <cstdint>
#include <span>

#include "kvonce/types.hpp"

namespace kvonce::emulation {

enum class Body : std::uint8_t { vector, matrix, per_head };
const char* to_string(Body body);

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

struct AttendKernel {
  Body body;
  DType dtype;
  int head_dim_qk;
  int head_dim_v;
  int row_tile;
  void (*run)(const AttendArgs& args, float* shared, const ThreadPlace& place);
};

struct MergeKernel {
  DType dtype;
  int head_dim_v;
  void (*run)(const MergeArgs& args, float* shared, const ThreadPlace& place);
};

std::span<const AttendKernel> attend_kernels();
/// Throws Error{Unsupported} when instances.def has none.
const AttendKernel& attend_kernel(Body body, DType dtype, std::int64_t head_dim_qk, std::int64_t head_dim_v,
                                  std::int64_t row_tile);
const MergeKernel& merge_kernel(DType dtype, std::int64_t head_dim_v);

}  // namespace kvonce::emulation
