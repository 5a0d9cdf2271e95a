// avx2: eight floats, AVX2 with FMA and F16C. The verbs are described in portable.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/store_lanes.hpp"
#include "cpu/simd/unroll.hpp"
#include "kvonce/types.hpp"
#include "shared/ggml_blocks.h"
#include "shared/numeric.h"

namespace kvonce::cpu::avx2 {

struct Simd {
  static constexpr const char* kName = "avx2";
  static constexpr int width = 8;
  static constexpr int kMaxRowTile = 4;
  static constexpr int kRegisters = 16;
  static constexpr bool kHasSplit = false;
  static constexpr bool kSplitsBlocks = false;
  static constexpr bool kSplitsTwice = false;
  static constexpr bool kHasLanes = false;
  static constexpr bool kHasPairDot = false;
  using Vec = __m256;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec broadcast(float x) { return _mm256_set1_ps(x); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec add_bias(Vec a, Vec b) {
    return _mm256_blendv_ps(add(a, b), b, _mm256_cmp_ps(b, broadcast(-__builtin_inff()), _CMP_EQ_OQ));
  }
  static Vec fmadd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static void pin(Vec& v) { asm("" : "+x"(v)); }
  static bool any_greater(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }

  static Vec exp2(Vec x) {
    const Vec lowest = broadcast(-126.0F);
    const Vec clamped = max(lowest, x);
    const Vec n = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec r = sub(clamped, n);
    Vec p = broadcast(1.5403530e-4F);
    p = fmadd(p, r, broadcast(1.3333558e-3F));
    p = fmadd(p, r, broadcast(9.6181291e-3F));
    p = fmadd(p, r, broadcast(5.5504109e-2F));
    p = fmadd(p, r, broadcast(2.4022651e-1F));
    p = fmadd(p, r, broadcast(6.9314718e-1F));
    p = fmadd(p, r, broadcast(1.0F));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const Vec scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    // Unordered or not less keeps NaN; below -126 the result is 0.
    const Vec kept = _mm256_and_ps(scaled, _mm256_cmp_ps(x, lowest, _CMP_NLT_UQ));
    return _mm256_blendv_ps(kept, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }

  /// Adds neighbouring lanes: [a0+a1, a2+a3, b0+b1, b2+b3] in each half.
  static Vec add_pairs(Vec a, Vec b) { return add(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)); }

  static Vec sum_lanes(const Vec (&v)[width]) {
    const Vec low = add_pairs(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
    const Vec high = add_pairs(add_pairs(v[4], v[5]), add_pairs(v[6], v[7]));
    return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
  }

  template <int period>
  static Vec max_across(Vec v) {
    if constexpr (period <= 4) v = max(v, _mm256_permute2f128_ps(v, v, 1));
    if constexpr (period <= 2) v = max(v, _mm256_permute_ps(v, 0x4E));
    if constexpr (period == 1) v = max(v, _mm256_permute_ps(v, 0xB1));
    return v;
  }

  KVONCE_INLINE static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  KVONCE_INLINE static void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

  template <KvFormat format>
  struct Elements;
  template <class E, class Value>
  struct InOrder;

  template <DType dtype>
  static void store_as(void* p, Vec v, std::int64_t count) {
    if (count == width) {
      if constexpr (dtype == DType::f32) store(static_cast<float*>(p), v);
      if constexpr (dtype == DType::f16) {
        _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
      }
      if constexpr (dtype == DType::bf16) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
        _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
      }
      return;
    }
    float lanes[width];
    store(lanes, v);
    store_lanes<dtype>(p, lanes, count);
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
  static Vec load(const Stored* p) { return _mm256_loadu_ps(p); }
};

template <>
struct Simd::Elements<KvFormat::f16> : Simd::InOrder<Simd::Elements<KvFormat::f16>, std::uint16_t> {
  static Vec load(const Stored* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
};

template <>
struct Simd::Elements<KvFormat::bf16> {
  using Stored = std::uint16_t;
  static constexpr bool kEvenOdd = true;
  static Vec load(const Stored* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static void load_pair(const Stored* p, Vec& a, Vec& b) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
  }
  static void store_pair(float* p, Vec a, Vec b) {
    const Vec low = _mm256_unpacklo_ps(a, b);
    const Vec high = _mm256_unpackhi_ps(a, b);
    store(p, _mm256_permute2f128_ps(low, high, 0x20));
    store(p + width, _mm256_permute2f128_ps(low, high, 0x31));
  }
};

template <>
struct Simd::Elements<KvFormat::q8_0> {
  using Stored = shared::Q8Block;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* block, int first, Vec& a, Vec& b) {
    const auto* codes = reinterpret_cast<const __m128i*>(block->codes + first);
    const auto* next_codes = reinterpret_cast<const __m128i*>(block->codes + first + width);
    const Vec scale = scale_of(block->scale);
    a = mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(codes))), scale);
    b = mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(next_codes))), scale);
  }
  static Vec scale_of(std::uint16_t f16) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(f16))); }
};

template <>
struct Simd::Elements<KvFormat::q4_0> {
  using Stored = shared::Q4Block;
  static constexpr bool kEvenOdd = false;
  /// `first` is 0, the low nibbles, or 16, the high ones.
  static void load_pair(const Stored* block, int first, Vec& a, Vec& b) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block->codes));
    const __m128i shifted = first == 0 ? bytes : _mm_srli_epi16(bytes, 4);
    const __m128i codes = _mm_sub_epi8(_mm_and_si128(shifted, _mm_set1_epi8(15)), _mm_set1_epi8(8));
    const Vec scale = Elements<KvFormat::q8_0>::scale_of(block->scale);
    a = mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), scale);
    b = mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))), scale);
  }
};

/// MLX's codes: 16 of them, of one group.
template <>
struct Simd::Elements<KvFormat::mlx_int8> {
  using Stored = std::uint8_t;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* codes, float scale, float bias, Vec& a, Vec& b) {
    const auto* p = reinterpret_cast<const __m128i*>(codes);
    const auto* next = reinterpret_cast<const __m128i*>(codes + width);
    a = fmadd(widen(_mm_loadl_epi64(p)), broadcast(scale), broadcast(bias));
    b = fmadd(widen(_mm_loadl_epi64(next)), broadcast(scale), broadcast(bias));
  }
  static Vec widen(__m128i codes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)); }
};

/// Neighbours share a byte: a holds the even values, b the odd ones.
template <>
struct Simd::Elements<KvFormat::mlx_int4> {
  using Stored = std::uint8_t;
  static constexpr bool kEvenOdd = true;
  static void load_pair(const Stored* codes, float scale, float bias, Vec& a, Vec& b) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m256i even = _mm256_and_si256(wide, _mm256_set1_epi32(15));
    a = fmadd(_mm256_cvtepi32_ps(even), broadcast(scale), broadcast(bias));
    b = fmadd(_mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4)), broadcast(scale), broadcast(bias));
  }
};

}  // namespace kvonce::cpu::avx2
