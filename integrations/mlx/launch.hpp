// The two kernels of a call, as src/metal/params.h wants them launched.
#pragma once

#include <mlx/array.h>
#include <mlx/utils.h>

#include <optional>
#include <string>
#include <utility>

#include "kvonce/plan.hpp"
#include "metal/policy.hpp"

namespace kvonce::mlx {

constexpr int kMinElements = 8;  // of an array: MLX passes smaller ones in another address space

/// A call whose arguments are right: q, k and v are of one dtype, dims and heads fit.
struct Call {
  ::mlx::core::array q;
  ::mlx::core::array k;
  ::mlx::core::array v;
  std::optional<::mlx::core::array> mask;   // broadcasts to [num_seqs, num_q_heads, q_len, kv_len]
  std::optional<::mlx::core::array> sinks;  // [num_q_heads]
  float scale;
  bool causal;
};

/// The GPU that MLX's architecture name stands for, "applegpu_g16s": its generation number alone counts.
Device gpu_of_architecture(const std::string& architecture);

/// What the Metal policy decides for the call on `gpu`, the same for every kv_len between two powers of two.
/// Throws Error{Unsupported} for what the kernels do not serve.
metal::Decision plan_of(const Call& call, const Device& gpu);

/// (out [num_seqs, num_q_heads, q_len, head_dim_v] in q's dtype, lse float32 [num_seqs, num_q_heads, q_len]), lazy.
/// `verbose`: MLX prints the kernels' text.
std::pair<::mlx::core::array, ::mlx::core::array> launch(const metal::Decision& plan, const Call& call,
                                                         ::mlx::core::StreamOrDevice s, bool verbose = false);

/// launch()'s out, as a function for which grad and vjp get what MLX's own function gives.
::mlx::core::array attend(const metal::Decision& plan, const Call& call, ::mlx::core::StreamOrDevice s);

}  // namespace kvonce::mlx
