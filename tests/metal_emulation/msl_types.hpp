// Types that Metal has and C++ lacks, for both forms in which the kernels compile on the host (dialect_host.h, msl_host.hpp).
// half and bfloat convert explicitly only, so that an expression that CUDA or MSL would refuse or round does not compile.
#pragma once

#include <cstdint>

#include "shared/numeric.h"

namespace kvonce::emulation {

struct half {
  std::uint16_t bits;
  half() = default;
  explicit half(float x) : bits(shared::f32_to_f16(x)) {}
  explicit operator float() const { return shared::f16_to_f32(bits); }
};

struct bfloat {
  std::uint16_t bits;
  bfloat() = default;
  explicit bfloat(float x) : bits(shared::f32_to_bf16(x)) {}
  explicit operator float() const { return shared::bf16_to_f32(bits); }
};

struct float2 {
  float x;
  float y;
};

}  // namespace kvonce::emulation
