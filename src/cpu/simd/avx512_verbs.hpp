// The verbs of both AVX-512 targets (F, BW, DQ, VL). Included inside the target's namespace, so that each target's
// translation unit owns its copy; portable.hpp describes the verbs.

struct Simd {
  static constexpr const char* kName = KVONCE_TARGET_NAME;
  static constexpr int width = 16;
  static constexpr int kMaxRowTile = 8;
  static constexpr int kRegisters = 32;
  static constexpr bool kHasSplit = true;
  static constexpr bool kSplitsBlocks = true;
  static constexpr bool kSplitsTwice = true;
  static constexpr bool kHasLanes = false;
  static constexpr bool kHasPairDot = KVONCE_TARGET_HAS_PAIR_DOT;
  using Vec = __m512;

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec broadcast(float x) { return _mm512_set1_ps(x); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec add_bias(Vec a, Vec b) {
    return _mm512_mask_add_ps(b, _mm512_cmp_ps_mask(b, broadcast(-__builtin_inff()), _CMP_NEQ_UQ), a, b);
  }
  static Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static void pin(Vec& v) { asm("" : "+v"(v)); }
  static void pin(__m512i& v) { asm("" : "+v"(v)); }
#if KVONCE_TARGET_HAS_PAIR_DOT
  /// Lane l: acc + a[2l] * b[2l] + a[2l + 1] * b[2l + 1] over 32 bf16 values; flushes denormal inputs to zero.
  using Pairs = __m512i;
  static Pairs load_pairs(const std::uint16_t* p) { return _mm512_loadu_si512(p); }
  static Pairs load_half_pairs(const std::uint16_t* p) {
    return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vec dot_pairs(Vec acc, Pairs a, Pairs b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static Pairs no_pairs() { return _mm512_setzero_si512(); }
  static Pairs broadcast_pair(std::uint32_t pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }
  /// Of two tokens' 32 values each the pairs of the even and of the odd dims.
  KVONCE_INLINE static void pair_tokens(Pairs first, Pairs second, Pairs& even, Pairs& odd) {
    constexpr __mmask32 kHigh = 0xAAAAAAAA;
    even = _mm512_mask_blend_epi16(kHigh, first, _mm512_slli_epi32(second, 16));
    odd = _mm512_mask_blend_epi16(kHigh, _mm512_srli_epi32(first, 16), second);
  }
  /// Weights [token][stride], of which `lanes` are used, to bf16: tokens t and t + 1 at pairs[t / 2 * lanes + lane]. An odd last
  /// token's partner weighs 0. Where stride == lanes, p may be read up to 31 floats past the last weight.
  template <int lanes>
  KVONCE_INLINE static void round_weights(const float* p, std::int64_t stride, std::int64_t num_tokens,
                                          std::uint32_t* pairs) {
    if (stride == lanes) {
      std::uint16_t order[32];
      for (int i = 0; i < 32; ++i)
        order[i] = static_cast<std::uint16_t>((i / 2 / lanes * 2 + i % 2) * lanes + i / 2 % lanes);
      const __m512i from = _mm512_loadu_si512(order);
      for (std::int64_t i = 0; i < num_tokens * lanes; i += 32) {
        const __m512bh rounded = _mm512_cvtne2ps_pbh(load(p + i + 16), load(p + i));
        _mm512_storeu_si512(pairs + i / 2, _mm512_permutexvar_epi16(from, reinterpret_cast<__m512i>(rounded)));
      }
    } else {
      for (std::int64_t t = 0; t < num_tokens; t += 2) {
        for (int lane = 0; lane < lanes; ++lane) {
          const std::uint32_t next = t + 1 < num_tokens ? shared::f32_to_bf16(p[(t + 1) * stride + lane]) : 0U;
          pairs[t / 2 * lanes + lane] = shared::f32_to_bf16(p[t * stride + lane]) | next << 16;
        }
      }
    }
    if (num_tokens % 2 == 1) {
      for (int lane = 0; lane < lanes; ++lane) pairs[num_tokens / 2 * lanes + lane] &= 0xffffU;
    }
  }
#endif

  static bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

  KVONCE_INLINE static Vec exp2(Vec x) {
    const Vec clamped = max(broadcast(-160.0F), x);  // keeps NaN; 2^-160 scales to 0
    const Vec n = _mm512_roundscale_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec r = sub(clamped, n);
    Vec p = broadcast(1.5403530e-4F);
    p = fmadd(p, r, broadcast(1.3333558e-3F));
    p = fmadd(p, r, broadcast(9.6181291e-3F));
    p = fmadd(p, r, broadcast(5.5504109e-2F));
    p = fmadd(p, r, broadcast(2.4022651e-1F));
    p = fmadd(p, r, broadcast(6.9314718e-1F));
    p = fmadd(p, r, broadcast(1.0F));
    return _mm512_scalef_ps(p, n);
  }

  KVONCE_INLINE static Vec sum_lanes(const Vec (&v)[width]) {
    // Each level halves the vectors: first the 256-bit halves, then the 128-bit quarters, then pairs of lanes.
    Vec half[8];
    KVONCE_UNROLL
    for (int i = 0; i < 8; ++i) {
      half[i] = add(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xEE));
    }
    return sum_halves(half);
  }

  static Vec load_twice(const float* p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }

  template <bool even_odd>
  static void store_halves(float* a, float* b, Vec v) {
    if constexpr (even_odd) {
      const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
      v = _mm512_permutexvar_ps(order, v);
    }
    _mm256_storeu_ps(a, _mm512_castps512_ps256(v));
    _mm256_storeu_ps(b, _mm512_extractf32x8_ps(v, 1));
  }

  KVONCE_INLINE static Vec sum_halves(const Vec (&v)[8]) {
    // The 128-bit quarters of each half first, then pairs of lanes.
    Vec quarter[4];
    KVONCE_UNROLL
    for (int i = 0; i < 4; ++i) {
      quarter[i] = add(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xDD));
    }
    const Vec low = add(_mm512_unpacklo_ps(quarter[0], quarter[1]), _mm512_unpackhi_ps(quarter[0], quarter[1]));
    const Vec high = add(_mm512_unpacklo_ps(quarter[2], quarter[3]), _mm512_unpackhi_ps(quarter[2], quarter[3]));
    const Vec sums = add(unpacklo_pairs(low, high), unpackhi_pairs(low, high));
    return _mm512_shuffle_f32x4(sums, sums, _MM_SHUFFLE(3, 1, 2, 0));  // 128-bit quarters stand in order 0, 2, 1, 3
  }

  KVONCE_INLINE static void store_half_sums(float* p, const Vec (&v)[8], float scale) {
    store(p, mul(sum_halves(v), broadcast(scale)));
  }

  static Vec unpacklo_pairs(Vec a, Vec b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static Vec unpackhi_pairs(Vec a, Vec b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }

  template <int period>
  static Vec max_across(Vec v) {
    if constexpr (period <= 8) v = max(v, _mm512_shuffle_f32x4(v, v, _MM_SHUFFLE(1, 0, 3, 2)));
    if constexpr (period <= 4) v = max(v, _mm512_shuffle_f32x4(v, v, _MM_SHUFFLE(2, 3, 0, 1)));
    if constexpr (period <= 2) v = max(v, _mm512_permute_ps(v, 0x4E));
    if constexpr (period == 1) v = max(v, _mm512_permute_ps(v, 0xB1));
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
    const auto mask = static_cast<__mmask16>((1U << count) - 1U);
    if constexpr (dtype == DType::f32) _mm512_mask_storeu_ps(p, mask, v);
    if constexpr (dtype == DType::f16) {
      _mm256_mask_storeu_epi16(p, mask, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    if constexpr (dtype == DType::bf16) {
      const __m512i bits = _mm512_castps_si512(v);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
      const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
      const __m512i kept = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet);
      _mm256_mask_storeu_epi16(p, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
    }
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
  static Vec load(const Stored* p) { return _mm512_loadu_ps(p); }
  static void load_split(const Stored* p0, const Stored* p1, Vec& a, Vec& b) {
    a = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(p0)), _mm256_loadu_ps(p1), 1);
    b = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(p0 + 8)), _mm256_loadu_ps(p1 + 8), 1);
  }
};

template <>
struct Simd::Elements<KvFormat::f16> : Simd::InOrder<Simd::Elements<KvFormat::f16>, std::uint16_t> {
  static __m256i join(const Stored* low, const Stored* high) {
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
    return _mm256_inserti128_si256(first, _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
  }
  static Vec load(const Stored* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static void load_split(const Stored* p0, const Stored* p1, Vec& a, Vec& b) {
    // Halves join as 16-bit values: 128 bits go into 256 from memory without a shuffle.
    a = _mm512_cvtph_ps(join(p0, p1));
    b = _mm512_cvtph_ps(join(p0 + 8, p1 + 8));
  }
};

template <>
struct Simd::Elements<KvFormat::bf16> {
  using Stored = std::uint16_t;
  static constexpr bool kEvenOdd = true;
  static Vec load(const Stored* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void load_pair(const Stored* p, Vec& a, Vec& b) { from_bits(_mm512_loadu_si512(p), a, b); }
  static void load_split(const Stored* p0, const Stored* p1, Vec& a, Vec& b) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p0));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p1));
    from_bits(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), a, b);
  }
  static void from_bits(__m512i bits, Vec& a, Vec& b) {
    pin(bits);  // one load, not one per use
    a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
  }
  static void store_pair(float* p, Vec a, Vec b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    store(p, _mm512_permutex2var_ps(a, low, b));
    store(p + width, _mm512_permutex2var_ps(a, high, b));
  }
};

/// A block of 32 values is a pair of vectors.
template <>
struct Simd::Elements<KvFormat::q8_0> {
  using Stored = shared::Q8Block;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* block, int /*first*/, Vec& a, Vec& b) {
    const auto* codes = reinterpret_cast<const __m128i*>(block->codes);
    const Vec scale = scale_of(block);
    a = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes))), scale);
    b = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1))), scale);
  }
  static void load_split(const Stored* p0, const Stored* p1, Vec& a, Vec& b, Vec& c, Vec& d) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p0->codes));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p1->codes));
    const __m256i ac = _mm256_unpacklo_epi64(first, second);
    const __m256i bd = _mm256_unpackhi_epi64(first, second);
    const Vec scale = scale_of(p0, p1);
    a = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(ac))), scale);
    b = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bd))), scale);
    c = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(ac, 1))), scale);
    d = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bd, 1))), scale);
  }
  /// From the first eight bytes of the block: the conversion then takes its operand from memory.
  static Vec scale_of(const void* block) {
    return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_loadl_epi64(static_cast<const __m128i*>(block))));
  }
  /// One block's in the lower half, the other's in the upper.
  static Vec scale_of(const void* p0, const void* p1) {
    return _mm512_mask_broadcastss_ps(scale_of(p0), 0xff00,
                                      _mm_cvtph_ps(_mm_loadl_epi64(static_cast<const __m128i*>(p1))));
  }
};

/// The low four bits of a lane choose one of the sixteen values that the block's scale allows.
template <>
struct Simd::Elements<KvFormat::q4_0> {
  using Stored = shared::Q4Block;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* block, int /*first*/, Vec& a, Vec& b) {
    const Vec levels = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const Vec values = mul(levels, Elements<KvFormat::q8_0>::scale_of(block));
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block->codes)));
    a = _mm512_permutexvar_ps(codes, values);
    b = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), values);
  }
  static void load_split(const Stored* p0, const Stored* p1, Vec& a, Vec& b, Vec& c, Vec& d) {
    const Vec levels = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p0->codes));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p1->codes));
    const __m512i ac = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(first, second));
    const __m512i bd = _mm512_cvtepu8_epi32(_mm_unpackhi_epi64(first, second));
    const Vec scale = Elements<KvFormat::q8_0>::scale_of(p0, p1);
    a = mul(_mm512_permutexvar_ps(ac, levels), scale);
    b = mul(_mm512_permutexvar_ps(bd, levels), scale);
    c = mul(_mm512_permutexvar_ps(_mm512_srli_epi32(ac, 4), levels), scale);
    d = mul(_mm512_permutexvar_ps(_mm512_srli_epi32(bd, 4), levels), scale);
  }
};

/// MLX's codes: 32 of them, of one group.
template <>
struct Simd::Elements<KvFormat::mlx_int8> {
  using Stored = std::uint8_t;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* codes, float scale, float bias, Vec& a, Vec& b) {
    const auto* p = reinterpret_cast<const __m128i*>(codes);
    a = fmadd(widen(_mm_loadu_si128(p)), broadcast(scale), broadcast(bias));
    b = fmadd(widen(_mm_loadu_si128(p + 1)), broadcast(scale), broadcast(bias));
  }
  static void load_split(const Stored* p0, const Stored* p1, const float* scale_0, const float* scale_1,
                         const float* bias_0, const float* bias_1, Vec (&v)[4]) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p0));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p1));
    const __m256i ac = _mm256_unpacklo_epi64(first, second);
    const __m256i bd = _mm256_unpackhi_epi64(first, second);
    const Vec scale = halves(scale_0, scale_1);
    const Vec bias = halves(bias_0, bias_1);
    v[0] = fmadd(widen(_mm256_castsi256_si128(ac)), scale, bias);
    v[1] = fmadd(widen(_mm256_castsi256_si128(bd)), scale, bias);
    v[2] = fmadd(widen(_mm256_extracti128_si256(ac, 1)), scale, bias);
    v[3] = fmadd(widen(_mm256_extracti128_si256(bd, 1)), scale, bias);
  }
  static Vec widen(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)); }
  /// One token's in the lower half, the other's in the upper.
  static Vec halves(const float* lower, const float* upper) {
    return _mm512_mask_broadcastss_ps(broadcast(*lower), 0xff00, _mm_load_ss(upper));
  }
};

/// The low four bits of a lane choose one of the sixteen values that the group's scale and bias allow. Neighbours share a byte:
/// one vector holds the even values, the other the odd ones.
template <>
struct Simd::Elements<KvFormat::mlx_int4> {
  using Stored = std::uint8_t;
  static constexpr bool kEvenOdd = true;
  static void load_pair(const Stored* codes, float scale, float bias, Vec& a, Vec& b) {
    const Vec values = fmadd(levels(), broadcast(scale), broadcast(bias));
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    a = _mm512_permutexvar_ps(wide, values);
    b = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), values);
  }
  static void load_split(const Stored* p0, const Stored* p1, const float* scale_0, const float* scale_1,
                         const float* bias_0, const float* bias_1, Vec (&v)[4]) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p0));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p1));
    const __m512i ab = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(first, second));
    const __m512i cd = _mm512_cvtepu8_epi32(_mm_unpackhi_epi64(first, second));
    const Vec scale = Elements<KvFormat::mlx_int8>::halves(scale_0, scale_1);
    const Vec bias = Elements<KvFormat::mlx_int8>::halves(bias_0, bias_1);
    v[0] = fmadd(_mm512_permutexvar_ps(ab, levels()), scale, bias);
    v[1] = fmadd(_mm512_permutexvar_ps(_mm512_srli_epi32(ab, 4), levels()), scale, bias);
    v[2] = fmadd(_mm512_permutexvar_ps(cd, levels()), scale, bias);
    v[3] = fmadd(_mm512_permutexvar_ps(_mm512_srli_epi32(cd, 4), levels()), scale, bias);
  }
  static Vec levels() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
};
