// portable: four floats in the compiler's vector extension, no instruction-set assumption.
//
// Every simd/*.hpp gives a struct with these verbs, so that attend.hpp and merge.hpp are written once:
//   width, kMaxRowTile, kRegisters     floats per vector; most rows of a tile; vector registers
//   kHasPairDot                        dot_pairs(acc, a, b) exists: products of bf16 pairs added to float32 lanes
//   zero broadcast load store          float32 vectors, any alignment
//   add sub mul div max fmadd          fmadd(a, b, c) = a * b + c; max is its second operand or NaN when either is NaN
//   add_bias(a, b)                     a + b, but -inf wherever b is -inf, NaN in a included
//   pin                                the value stays in a register: gcc otherwise folds a load into each of its uses,
//                                      and the kernels are bound by loads (f32, 8 rows, d128, AVX-512: 1.45x, Ice Lake)
//   kHasSplit                          the verbs of attend_split.hpp: load_twice(p) puts width / 2 floats into both halves,
//                                      store_halves<even_odd> takes them apart (even_odd: even and odd lanes),
//                                      store_half_sums(p, v, scale), 8 vectors: p[i] is scale times the sum of v[i]'s lower
//                                      half, p[8 + i] of its upper half,
//                                      load_split(p0, p1, a, b) loads `width` dims of two tokens, half a vector of each;
//                                      kSplitsBlocks: block formats have load_split(p0, p1, a, b, c, d) for a block of each; MLX's
//                                      take two rows' codes, scales and biases and fill v[4]
//                                      kSplitsTwice: a plain load of q stored twice beats load_twice
//   kHasPairDot                        the verbs of attend_dot.hpp: dot_pairs(acc, a, b), broadcast_pair(bits), pair_tokens(first,
//                                      second, a, b) makes pairs of two tokens' values in the order of the format's dims,
//                                      round_weights<lanes> makes pairs of two tokens' weights
//   kHasLanes                          a multiply-add takes one lane of a register as its factor: load_lanes<count>(p),
//                                      fmadd_lane(a, lanes, i, c) = a * p[i] + c
//   exp2                               2^x for x <= 0; -inf gives exactly 0, NaN stays NaN; relative error < 2e-7
//   any_greater(a, b)                  true when a > b in some lane
//   sum_lanes(v)                       lane i of the result is the sum of the lanes of v[i]
//   max_across<period>                 every lane gets the maximum over the lanes that are equal to it modulo period
//   prefetch, prefetch_l2              one cache line into the nearest cache, or into L2; never faults. Inlined by force: gcc
//                                      drops calls of a function that does nothing else
//   Elements<format>                   how `width` or 2 * `width` stored values become float32 vectors; of block formats only values
//                                      [first, first + 2 * width) of a block
//   store_as<dtype>(p, v, count)       the first count lanes rounded to dtype
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd/store_lanes.hpp"
#include "cpu/simd/unroll.hpp"
#include "kvonce/types.hpp"
#include "shared/ggml_blocks.h"
#include "shared/numeric.h"

namespace kvonce::cpu::portable {

struct Simd {
  static constexpr const char* kName = "portable";
  static constexpr int width = 4;
  static constexpr int kMaxRowTile = 4;
  static constexpr int kRegisters = 16;
  static constexpr bool kHasSplit = false;
  static constexpr bool kSplitsBlocks = false;
  static constexpr bool kSplitsTwice = false;
  static constexpr bool kHasLanes = false;
  static constexpr bool kHasPairDot = false;
  typedef float Vec __attribute__((vector_size(16)));
  typedef std::int32_t IntVec __attribute__((vector_size(16)));

  static Vec zero() { return Vec{}; }
  static Vec broadcast(float x) { return Vec{x, x, x, x}; }
  static Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec div(Vec a, Vec b) { return a / b; }
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }
  static Vec add_bias(Vec a, Vec b) { return b == broadcast(-__builtin_inff()) ? b : a + b; }
  static Vec fmadd(Vec a, Vec b, Vec c) { return a * b + c; }

  static void pin([[maybe_unused]] Vec& v) {
#if defined(__x86_64__)
    asm("" : "+x"(v));
#endif
  }

  static bool any_greater(Vec a, Vec b) {
    const IntVec greater = a > b;
    return (greater[0] | greater[1] | greater[2] | greater[3]) != 0;
  }

  static Vec exp2(Vec x) {
    // Rounds to the nearest integer by the classic magic number, then a polynomial on [-0.5, 0.5].
    const Vec clamped = max(broadcast(-126.0F), x);
    const Vec magic = broadcast(12582912.0F);  // 1.5 * 2^23
    const Vec shifted = clamped + magic;
    const Vec r = clamped - (shifted - magic);
    Vec p = broadcast(1.5403530e-4F);
    p = p * r + broadcast(1.3333558e-3F);
    p = p * r + broadcast(9.6181291e-3F);
    p = p * r + broadcast(5.5504109e-2F);
    p = p * r + broadcast(2.4022651e-1F);
    p = p * r + broadcast(6.9314718e-1F);
    p = p * r + broadcast(1.0F);
    IntVec exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    IntVec bits;
    std::memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;
    std::memcpy(&p, &bits, sizeof p);
    p = x < broadcast(-126.0F) ? Vec{} : p;
    return x == x ? p : x;
  }

  static Vec sum_lanes(const Vec (&v)[width]) {
    Vec sums;
    for (int i = 0; i < width; ++i) sums[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
    return sums;
  }

  template <int period>
  static Vec max_across(Vec v) {
    if constexpr (period <= 2) v = max(v, Vec{v[2], v[3], v[0], v[1]});
    if constexpr (period == 1) v = max(v, Vec{v[1], v[0], v[3], v[2]});
    return v;
  }

  KVONCE_INLINE static void prefetch(const void* p) { __builtin_prefetch(p); }
  KVONCE_INLINE static void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

  template <KvFormat format>
  struct Elements;
  template <class E, class Value>
  struct InOrder;

  template <DType dtype>
  static void store_as(void* p, Vec v, std::int64_t count) {
    store_lanes<dtype>(p, v, count);
  }
};

/// What formats share whose dims stay in order.
template <class E, class Value>
struct Simd::InOrder {
  using Stored = Value;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* p, Vec& a, Vec& b) {
    a = E::load(p);
    b = E::load(p + width);
  }
  static void store_pair(float* p, Vec a, Vec b) {
    store(p, a);
    store(p + width, b);
  }
};

template <>
struct Simd::Elements<KvFormat::f32> : Simd::InOrder<Simd::Elements<KvFormat::f32>, float> {
  static Vec load(const Stored* p) { return Simd::load(p); }
};

template <>
struct Simd::Elements<KvFormat::f16> : Simd::InOrder<Simd::Elements<KvFormat::f16>, std::uint16_t> {
  static Vec load(const Stored* p) {
    return Vec{shared::f16_to_f32(p[0]), shared::f16_to_f32(p[1]), shared::f16_to_f32(p[2]), shared::f16_to_f32(p[3])};
  }
};

template <>
struct Simd::Elements<KvFormat::bf16> {
  using Stored = std::uint16_t;
  static constexpr bool kEvenOdd = true;
  static Vec load(const Stored* p) {
    return Vec{shared::bf16_to_f32(p[0]), shared::bf16_to_f32(p[1]), shared::bf16_to_f32(p[2]),
               shared::bf16_to_f32(p[3])};
  }
  /// a holds the even values, b the odd ones: one shift and one mask for 2 * width values (little-endian).
  static void load_pair(const Stored* p, Vec& a, Vec& b) {
    typedef std::uint32_t Bits __attribute__((vector_size(16)));
    Bits bits;
    std::memcpy(&bits, p, sizeof bits);
    const Bits even = bits << 16;
    const Bits odd = bits & 0xffff0000U;
    std::memcpy(&a, &even, sizeof a);
    std::memcpy(&b, &odd, sizeof b);
  }
  static void store_pair(float* p, Vec a, Vec b) {
    for (int i = 0; i < width; ++i) {
      p[2 * i] = a[i];
      p[2 * i + 1] = b[i];
    }
  }
};

template <>
struct Simd::Elements<KvFormat::q8_0> {
  using Stored = shared::Q8Block;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* block, int first, Vec& a, Vec& b) {
    const float scale = shared::f16_to_f32(block->scale);
    for (int i = 0; i < width; ++i) {
      a[i] = static_cast<float>(block->codes[first + i]) * scale;
      b[i] = static_cast<float>(block->codes[first + width + i]) * scale;
    }
  }
};

template <>
struct Simd::Elements<KvFormat::q4_0> {
  using Stored = shared::Q4Block;
  static constexpr bool kEvenOdd = false;
  /// `first` below 16: low nibbles, else high ones.
  static void load_pair(const Stored* block, int first, Vec& a, Vec& b) {
    const float scale = shared::f16_to_f32(block->scale);
    const int shift = first / 16 * 4;
    const std::uint8_t* codes = block->codes + first % 16;
    for (int i = 0; i < width; ++i) {
      a[i] = static_cast<float>((codes[i] >> shift & 15) - 8) * scale;
      b[i] = static_cast<float>((codes[width + i] >> shift & 15) - 8) * scale;
    }
  }
};

/// MLX's codes: 2 * width of them, of one group.
template <>
struct Simd::Elements<KvFormat::mlx_int8> {
  using Stored = std::uint8_t;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* codes, float scale, float bias, Vec& a, Vec& b) {
    for (int i = 0; i < width; ++i) {
      a[i] = static_cast<float>(codes[i]) * scale + bias;
      b[i] = static_cast<float>(codes[width + i]) * scale + bias;
    }
  }
};

/// Neighbours share a byte: a holds the even values, b the odd ones.
template <>
struct Simd::Elements<KvFormat::mlx_int4> {
  using Stored = std::uint8_t;
  static constexpr bool kEvenOdd = true;
  static void load_pair(const Stored* codes, float scale, float bias, Vec& a, Vec& b) {
    for (int i = 0; i < width; ++i) {
      a[i] = static_cast<float>(codes[i] & 15) * scale + bias;
      b[i] = static_cast<float>(codes[i] >> 4) * scale + bias;
    }
  }
};

}  // namespace kvonce::cpu::portable
