// Element conversions, one value at a time: the single definition that the oracle, the tools and the tests use.
// Rounding is to nearest, ties to even; NaN stays NaN (quiet), infinities stay.
#pragma once

#include <cstdint>
#include <cstring>

#include "shared/function.h"

namespace kvonce::shared {

KVONCE_FN std::uint32_t bits_of(float x) {
  std::uint32_t u = 0;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

KVONCE_FN float float_of(std::uint32_t u) {
  float x = 0;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

KVONCE_FN float bf16_to_f32(std::uint16_t h) { return float_of(static_cast<std::uint32_t>(h) << 16); }

KVONCE_FN std::uint16_t f32_to_bf16(float x) {
  const std::uint32_t u = bits_of(x);
  if ((u & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((u >> 16) | 0x40U);
  return static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
}

KVONCE_FN float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000U) << 16;
  const std::uint32_t magnitude = h & 0x7fffU;
  if (magnitude >= 0x7c00U) return float_of(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13));
  if (magnitude >= 0x0400U) return float_of(sign | ((magnitude << 13) + 0x38000000U));
  // Subnormal: magnitude * 2^-24, exact in float.
  const float value = static_cast<float>(magnitude) * 0x1p-24F;
  return float_of(sign | bits_of(value));
}

KVONCE_FN std::uint16_t f32_to_f16(float x) {
  const std::uint32_t u = bits_of(x);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000U);
  const std::uint32_t magnitude = u & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // rounds to 2^16 or beyond
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 0.5 leaves the value's multiple of 2^-24, rounded to even, in the low mantissa bits.
    const std::uint32_t shifted = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
    return static_cast<std::uint16_t>(sign | shifted);
  }
  const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

/// OCP fp8 e4m3: no infinities, 0x7f and 0xff are NaN, largest 448.
KVONCE_FN float f8_e4m3_to_f32(std::uint8_t b) {
  const float sign = (b & 0x80U) != 0 ? -1.0F : 1.0F;
  const std::uint32_t exponent = (b >> 3) & 0xfU;
  const std::uint32_t mantissa = b & 7U;
  if (exponent == 0xfU && mantissa == 7U) return float_of(0x7fc00000U);
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-9F;
  return sign * float_of(((exponent + 120U) << 23) | (mantissa << 20));
}

}  // namespace kvonce::shared
