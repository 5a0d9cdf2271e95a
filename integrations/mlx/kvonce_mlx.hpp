// mlx::core::fast::scaled_dot_product_attention for C++ programs on MLX, each byte of K and V read once.
#pragma once

#include <mlx/array.h>
#include <mlx/utils.h>

#include <optional>
#include <string>

namespace kvonce::mlx {

/// softmax(scale * q k^T + mask) v. On an Apple GPU by kvonce's kernels, which MLX compiles on the user's machine; what
/// why_not_served() names goes to MLX's own function. Lazy as everything of MLX. grad and vjp give
/// MLX's gradients; jvp, vmap and export_function fail where kvonce serves, since MLX has no rules for kernels.
///
/// queries: [num_seqs, num_q_heads, q_len, head_dim_qk]; float32, float16 or bfloat16.
/// keys:    [num_seqs, num_kv_heads, kv_len, head_dim_qk], not repeated, any strides; num_q_heads is a multiple of num_kv_heads.
/// values:  [num_seqs, num_kv_heads, kv_len, head_dim_v].
/// mask_mode: "" (every query token sees every key, or mask_arr says what), "causal" (bottom-right aligned) or "array".
/// mask_arr: at most 4 dims, broadcast to [num_seqs, num_q_heads, q_len, kv_len]; bool (false hides) or added to the scores.
/// sinks:   [num_q_heads], one extra logit per query head without a value.
/// force_fused: of MLX's function, for calls that go there.
///
/// Returns [num_seqs, num_q_heads, q_len, head_dim_v] in the dtype that the three promote to. A row that sees no key is 0
/// where kvonce serves. Throws std::invalid_argument, naming the argument, what was given and what is allowed.
::mlx::core::array scaled_dot_product_attention(const ::mlx::core::array& queries, const ::mlx::core::array& keys,
                                                const ::mlx::core::array& values, float scale,
                                                const std::string& mask_mode = "",
                                                const std::optional<::mlx::core::array>& mask_arr = {},
                                                const std::optional<::mlx::core::array>& sinks = {},
                                                bool force_fused = false, ::mlx::core::StreamOrDevice s = {});

/// Why such a call would go to MLX's own function, or an empty string. Throws as the function itself does.
std::string why_not_served(const ::mlx::core::array& queries, const ::mlx::core::array& keys,
                           const ::mlx::core::array& values, const std::string& mask_mode = "",
                           const std::optional<::mlx::core::array>& mask_arr = {},
                           const std::optional<::mlx::core::array>& sinks = {}, ::mlx::core::StreamOrDevice s = {});

}  // namespace kvonce::mlx
