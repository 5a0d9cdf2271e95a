// The loops that a baseline or a rate is made of, compiled once per CPU target like the library's own kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvonce/types.hpp"

namespace kvonce::bench {

/// Reads every byte of [data, data + bytes) once and folds it into one value, the same for every loop and every target.
/// `data` is 64-byte aligned, bytes a multiple of 64.
struct ReadLoop {
  const char* name = nullptr;
  std::uint64_t (*run)(const void* data, std::size_t bytes) = nullptr;
};

/// One query row over the token steps first_step, first_step + step_stride, ... of one KV stream.
/// Step i holds the tokens [i * step_tokens, (i + 1) * step_tokens) below token_end.
struct PerHeadTask {
  const void* q = nullptr;  // [head_dim_qk] of q_dtype
  DType q_dtype = DType::f32;
  float scale_log2 = 1.0F;  // softmax scale times log2(e)
  const void* k = nullptr;  // [token_end, head_dim_qk] of the KV format, k_token_stride elements apart
  const void* v = nullptr;  // [token_end, head_dim_v], v_token_stride elements apart
  std::int64_t k_token_stride = 0;
  std::int64_t v_token_stride = 0;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t token_end = 0;
  std::int64_t step_tokens = 0;  // 1..kMaxStepTokens
  std::int64_t first_step = 0;
  std::int64_t step_stride = 1;
  std::int64_t prefetch_level = 1;  // as Policy's
  float* o = nullptr;               // [head_dim_v], normalised
  float* lse = nullptr;             // natural log; -inf without tokens
};
constexpr std::int64_t kMaxStepTokens = 128;
constexpr std::int64_t kMaxHeadDim = 1024;

/// Joins num_parts partials of one row: o [num_parts, head_dim_v] packed, lse [num_parts].
struct MergeTask {
  const float* o = nullptr;
  const float* lse = nullptr;
  std::int64_t num_parts = 0;
  std::int64_t head_dim_v = 0;
  float* out = nullptr;  // [head_dim_v]
};

/// y = matrix * x for rows [0, num_rows) of a packed f16 matrix, accumulated in f32.
struct QmvTask {
  const std::uint16_t* matrix = nullptr;  // [num_rows, num_cols] f16
  const float* x = nullptr;               // [num_cols]
  float* y = nullptr;                     // [num_rows]
  std::int64_t num_rows = 0;
  std::int64_t num_cols = 0;  // a multiple of 64
};

/// A loop that does nothing but `ops_per_iteration` multiply-adds per iteration, operands in registers.
struct MaddLoop {
  float (*run)(std::int64_t iterations) = nullptr;  // the result depends on every multiply-add
  std::int64_t madds_per_iteration = 0;
  std::int64_t madds_per_instruction = 0;
};

constexpr std::size_t kNumReadLoops = 6;

struct TargetKernels {
  std::string_view target;
  std::int64_t vector_floats = 0;
  std::array<ReadLoop, kNumReadLoops> read_loops{};
  std::array<void (*)(const PerHeadTask&), 3> per_head{};  // by KvFormat f32, f16, bf16
  void (*merge)(const MergeTask&) = nullptr;
  void (*qmv)(const QmvTask&) = nullptr;
  MaddLoop madd;       // f32
  MaddLoop madd_bf16;  // the bf16 dot product; run is null on targets without one
  void (*exp2)(const float* in, float* out, std::int64_t count) = nullptr;  // count a multiple of 64
};

/// The kernels of a target by its name. Throws Error{Unavailable} when they are not built in; whether the machine can
/// execute them is the caller's question (kvonce::cpu_device).
const TargetKernels& target_kernels(std::string_view target);

}  // namespace kvonce::bench
