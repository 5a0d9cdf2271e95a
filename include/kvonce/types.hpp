// The vocabulary every other header uses: element types, cache formats, mask kinds, backends and the one error type.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#if defined(__GNUC__)
#define KVONCE_API __attribute__((visibility("default")))
#else
#define KVONCE_API
#endif

namespace kvonce {

/// Element type of q, out and plain (unquantised) tensors.
enum class DType : std::uint8_t { f32, f16, bf16 };

/// How one of K or V is stored. The first three hold one element per value and agree with DType in order.
enum class KvFormat : std::uint8_t {
  f32,
  f16,
  bf16,
  f8_e4m3,  // one byte per value, no infinities, one float scale per KV head
  mlx_int8,  // MLX affine: scale * code + bias; 8-bit codes, a scale and a bias per `quant_group` values in arrays of their own
  mlx_int4,  // MLX affine: 4-bit codes, two per byte, low nibble first
  q8_0,      // GGML: blocks of 32 values, one f16 scale and 32 int8
  q4_0,  // GGML: blocks of 32 values, one f16 scale and 16 bytes, value i in the low nibble of byte i, i + 16 in the high
};

/// A mask given as an array, on top of `Problem::causal` and `Problem::window`.
enum class MaskKind : std::uint8_t {
  none,
  boolean,   // uint8, 0 hides the key; broadcastable to [num_seqs, num_q_heads, q_len, kv_len]
  additive,  // Problem::mask_dtype, added to the scaled, soft-capped score; same shape; -inf hides the key
  tree,      // uint8 [num_seqs, q_len, q_len] over the newest q_len keys, older keys are visible (speculative trees)
};

/// Where the tokens of K and V are.
enum class KvLayout : std::uint8_t {
  strided,    // any strides between sequences, heads and tokens: BHSD, BSHD, slices, expanded heads
  paged_nhd,  // pages of [page_size, num_kv_heads, head_dim], found through a block table
  paged_hnd,  // pages of [num_kv_heads, page_size, head_dim]
};

enum class Backend : std::uint8_t { cpu, cuda, metal };

/// Why a call was refused. The C ABI's kvonce_status has the same values.
enum class ErrorCode : std::uint8_t {
  InvalidArgument = 1,  // the argument can never be right; the message names it, what was given and what is allowed
  Unsupported = 2,      // right, but not served by this backend; the message says what to use instead
  Unavailable = 3,      // the backend or target is not built in or not on this machine; the message says why
  Internal = 4,         // a fault of the library
};

/// Thrown by make_plan and by the argument checks of attend and merge; nothing has been written when it is thrown.
class KVONCE_API Error : public std::runtime_error {
 public:
  Error(ErrorCode error_code, const std::string& message) : std::runtime_error(message), code_(error_code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

KVONCE_API std::string_view to_string(DType dtype) noexcept;
KVONCE_API std::string_view to_string(KvFormat format) noexcept;
KVONCE_API std::string_view to_string(MaskKind mask) noexcept;
KVONCE_API std::string_view to_string(KvLayout layout) noexcept;
KVONCE_API std::string_view to_string(Backend backend) noexcept;

/// Bytes that `count` values of `format` occupy: whole blocks for block formats. 0 when count is 0.
KVONCE_API std::int64_t format_bytes(KvFormat format, std::int64_t count) noexcept;

/// "major.minor.patch" of the library that is loaded.
KVONCE_API std::string_view version() noexcept;

}  // namespace kvonce
