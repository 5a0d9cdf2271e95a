// The verbs of both NEON targets (AArch64). Included inside the target's namespace, so that each target's translation
// unit owns its copy; portable.hpp describes the verbs.
//
// A register holds four floats and there are 32 of them, so a Vec is two registers: every row tile then keeps 16
// accumulator registers busy, which covers the latency of the multiply-adds, and the halves of a Vec are plain registers
// for attend_split.hpp.

struct Simd {
  static constexpr const char* kName = KVONCE_TARGET_NAME;
  static constexpr int width = 8;
  static constexpr int kMaxRowTile = 8;
  static constexpr int kRegisters = 16;  // in Vec
  static constexpr bool kHasSplit = true;
  static constexpr bool kSplitsBlocks = false;
  static constexpr bool kSplitsTwice = false;
  static constexpr bool kHasLanes = true;
  static constexpr bool kHasPairDot = KVONCE_TARGET_HAS_PAIR_DOT;
  struct Vec {
    float32x4_t lo;
    float32x4_t hi;
  };

  static Vec zero() { return broadcast(0.0F); }
  static Vec broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static void store(float* p, Vec v) {
    vst1q_f32(p, v.lo);
    vst1q_f32(p + 4, v.hi);
  }
  static Vec add(Vec a, Vec b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
  static Vec sub(Vec a, Vec b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
  static Vec mul(Vec a, Vec b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
  static Vec div(Vec a, Vec b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
  static Vec add_bias(Vec a, Vec b) {
    const float32x4_t hidden = vdupq_n_f32(-__builtin_inff());
    return {vbslq_f32(vceqq_f32(b.lo, hidden), b.lo, vaddq_f32(a.lo, b.lo)),
            vbslq_f32(vceqq_f32(b.hi, hidden), b.hi, vaddq_f32(a.hi, b.hi))};
  }
  static Vec max(Vec a, Vec b) { return {vmaxq_f32(a.lo, b.lo), vmaxq_f32(a.hi, b.hi)}; }
  static Vec fmadd(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }

  /// FMLA takes one lane of a register as its factor: four weights are one load and need no broadcast.
  template <int count>
  struct Lanes {
    float32x4_t part[count / 4];
  };
  template <int count>
  static Lanes<count> load_lanes(const float* p) {
    Lanes<count> lanes;
    KVONCE_UNROLL
    for (int i = 0; i < count / 4; ++i) lanes.part[i] = vld1q_f32(p + 4 * i);
    return lanes;
  }
  template <int count>
  static Vec fmadd_lane(Vec a, const Lanes<count>& b, int lane, Vec c) {
    const float factor = b.part[lane / 4][lane % 4];
    return {vfmaq_n_f32(c.lo, a.lo, factor), vfmaq_n_f32(c.hi, a.hi, factor)};
  }

  // Arithmetic has no memory operands here: nothing to hold back.
  static void pin(const Vec& /*v*/) {}
#if KVONCE_TARGET_HAS_PAIR_DOT
  /// Lane l: acc + a[2l] * b[2l] + a[2l + 1] * b[2l + 1] over 16 bf16 values. BFDOT flushes denormal inputs and results
  /// to zero and rounds its sums to odd.
  struct Pairs {
    bfloat16x8_t lo;
    bfloat16x8_t hi;
  };
  static void pin(const Pairs& /*v*/) {}
  static bfloat16x8_t as_bf16(uint16x8_t bits) { return vreinterpretq_bf16_u16(bits); }
  static bfloat16x8_t load_eight(const std::uint16_t* p) { return as_bf16(vld1q_u16(p)); }
  static bfloat16x8_t zip_low(bfloat16x8_t a, bfloat16x8_t b) {
    return as_bf16(vzip1q_u16(vreinterpretq_u16_bf16(a), vreinterpretq_u16_bf16(b)));
  }
  static bfloat16x8_t zip_high(bfloat16x8_t a, bfloat16x8_t b) {
    return as_bf16(vzip2q_u16(vreinterpretq_u16_bf16(a), vreinterpretq_u16_bf16(b)));
  }
  static Pairs load_pairs(const std::uint16_t* p) { return {load_eight(p), load_eight(p + 8)}; }
  static Pairs load_half_pairs(const std::uint16_t* p) {
    return {load_eight(p), vreinterpretq_bf16_u16(vdupq_n_u16(0))};
  }
  static Vec dot_pairs(Vec acc, Pairs a, Pairs b) {
    return {vbfdotq_f32(acc.lo, a.lo, b.lo), vbfdotq_f32(acc.hi, a.hi, b.hi)};
  }
  static Pairs no_pairs() { return {as_bf16(vdupq_n_u16(0)), as_bf16(vdupq_n_u16(0))}; }
  static Pairs broadcast_pair(std::uint32_t pair) {
    const bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
    return {both, both};
  }
  /// Of two tokens' 16 values each the pairs of dims 0 to 7 and of dims 8 to 15.
  KVONCE_INLINE static void pair_tokens(Pairs first, Pairs second, Pairs& low, Pairs& high) {
    low = {zip_low(first.lo, second.lo), zip_high(first.lo, second.lo)};
    high = {zip_low(first.hi, second.hi), zip_high(first.hi, second.hi)};
  }
  /// Weights [token][stride], of which `lanes` are used, to bf16: tokens t and t + 1 at pairs[t / 2 * lanes + lane]. An odd last
  /// token's partner weighs 0.
  template <int lanes>
  KVONCE_INLINE static void round_weights(const float* p, std::int64_t stride, std::int64_t num_tokens,
                                          std::uint32_t* pairs) {
    for (std::int64_t t = 0; t < num_tokens; t += 2, pairs += lanes, p += 2 * stride) {
      const bool has_next = t + 1 < num_tokens;
      if constexpr (lanes >= 4) {
        for (int lane = 0; lane < lanes; lane += 4) {
          const float32x4_t next = has_next ? vld1q_f32(p + stride + lane) : vdupq_n_f32(0.0F);
          const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(vld1q_f32(p + lane)), next);
          const uint16x8_t bits = vreinterpretq_u16_bf16(both);
          vst1q_u32(pairs + lane, vreinterpretq_u32_u16(vzip1q_u16(bits, vextq_u16(bits, bits, 4))));
        }
      } else {
        for (int lane = 0; lane < lanes; ++lane) {
          const std::uint32_t next = has_next ? shared::f32_to_bf16(p[stride + lane]) : 0U;
          pairs[lane] = shared::f32_to_bf16(p[lane]) | next << 16;
        }
      }
    }
  }
#endif

  static bool any_greater(Vec a, Vec b) {
    return vmaxvq_u32(vorrq_u32(vcgtq_f32(a.lo, b.lo), vcgtq_f32(a.hi, b.hi))) != 0;
  }

  [[gnu::always_inline]] static Vec exp2(Vec x) { return {exp2_of_four(x.lo), exp2_of_four(x.hi)}; }

  [[gnu::always_inline]] static float32x4_t exp2_of_four(float32x4_t x) {
    const float32x4_t lowest = vdupq_n_f32(-126.0F);
    const float32x4_t clamped = vmaxq_f32(lowest, x);
    const float32x4_t n = vrndnq_f32(clamped);
    const float32x4_t r = vsubq_f32(clamped, n);
    float32x4_t p = vdupq_n_f32(1.5403530e-4F);
    p = vfmaq_f32(vdupq_n_f32(1.3333558e-3F), p, r);
    p = vfmaq_f32(vdupq_n_f32(9.6181291e-3F), p, r);
    p = vfmaq_f32(vdupq_n_f32(5.5504109e-2F), p, r);
    p = vfmaq_f32(vdupq_n_f32(2.4022651e-1F), p, r);
    p = vfmaq_f32(vdupq_n_f32(6.9314718e-1F), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0F), p, r);
    // A NaN converts to 0 and is not less than anything: p, NaN itself, stays.
    const uint32x4_t exponent = vreinterpretq_u32_s32(vshlq_n_s32(vcvtq_s32_f32(n), 23));
    const uint32x4_t scaled = vaddq_u32(vreinterpretq_u32_f32(p), exponent);
    return vreinterpretq_f32_u32(vbicq_u32(scaled, vcltq_f32(x, lowest)));
  }

  /// The sums over a, b, c and d.
  static float32x4_t sum_four(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
  }

  [[gnu::always_inline]] static Vec sum_lanes(const Vec (&v)[width]) {
    float32x4_t sum[width];
    KVONCE_UNROLL
    for (int i = 0; i < width; ++i) sum[i] = vaddq_f32(v[i].lo, v[i].hi);
    return {sum_four(sum[0], sum[1], sum[2], sum[3]), sum_four(sum[4], sum[5], sum[6], sum[7])};
  }

  static Vec load_twice(const float* p) {
    const float32x4_t half = vld1q_f32(p);
    return {half, half};
  }

  template <bool even_odd>
  static void store_halves(float* a, float* b, Vec v) {
    static_assert(!even_odd, "every format loads in order");
    vst1q_f32(a, v.lo);
    vst1q_f32(b, v.hi);
  }

  [[gnu::always_inline]] static void store_half_sums(float* p, const Vec (&v)[8], float scale) {
    store(p, mul({sum_four(v[0].lo, v[1].lo, v[2].lo, v[3].lo), sum_four(v[4].lo, v[5].lo, v[6].lo, v[7].lo)},
                 broadcast(scale)));
    store(p + 8, mul({sum_four(v[0].hi, v[1].hi, v[2].hi, v[3].hi), sum_four(v[4].hi, v[5].hi, v[6].hi, v[7].hi)},
                     broadcast(scale)));
  }

  template <int period>
  static Vec max_across(Vec v) {
    if constexpr (period > 4) return v;
    float32x4_t all = vmaxq_f32(v.lo, v.hi);
    if constexpr (period <= 2) all = vmaxq_f32(all, vextq_f32(all, all, 2));
    if constexpr (period == 1) all = vmaxq_f32(all, vrev64q_f32(all));
    return {all, all};
  }

  KVONCE_INLINE static void prefetch(const void* p) { __builtin_prefetch(p); }
  KVONCE_INLINE static void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

  template <KvFormat format>
  struct Elements;
  template <class E, class Value>
  struct InOrder;

  /// Rounded to the nearest bf16, ties to even; NaN stays NaN.
  static uint16x4_t to_bf16(float32x4_t v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
  }

  template <DType dtype>
  static void store_as(void* p, Vec v, std::int64_t count) {
    if (count == width) {
      if constexpr (dtype == DType::f32) store(static_cast<float*>(p), v);
      if constexpr (dtype == DType::f16) {
        const float16x8_t rounded = vcvt_high_f16_f32(vcvt_f16_f32(v.lo), v.hi);
        vst1q_u16(static_cast<std::uint16_t*>(p), vreinterpretq_u16_f16(rounded));
      }
      if constexpr (dtype == DType::bf16) {
        vst1q_u16(static_cast<std::uint16_t*>(p), vcombine_u16(to_bf16(v.lo), to_bf16(v.hi)));
      }
      return;
    }
    float lanes[width];
    store(lanes, v);
    store_lanes<dtype>(p, lanes, count);
  }
};

/// Every format's dims stay in order: widening the lower and the upper half costs no more than even and odd values.
template <class E, class Value>
struct Simd::InOrder {
  using Stored = Value;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* p, Vec& a, Vec& b) {
    a = E::load(p);
    b = E::load(p + width);
  }
  static void load_split(const Stored* p0, const Stored* p1, Vec& a, Vec& b) {
    const Vec first = E::load(p0);
    const Vec second = E::load(p1);
    a = {first.lo, second.lo};
    b = {first.hi, second.hi};
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
    const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
  }
};

template <>
struct Simd::Elements<KvFormat::bf16> : Simd::InOrder<Simd::Elements<KvFormat::bf16>, std::uint16_t> {
  /// Zeros zipped below the values: one permute for four of them.
  static Vec load(const Stored* p) {
    const uint16x8_t bits = vld1q_u16(p);
    const uint16x8_t zeros = vdupq_n_u16(0);
    return {vreinterpretq_f32_u16(vzip1q_u16(zeros, bits)), vreinterpretq_f32_u16(vzip2q_u16(zeros, bits))};
  }
};

template <>
struct Simd::Elements<KvFormat::q8_0> {
  using Stored = shared::Q8Block;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* block, int first, Vec& a, Vec& b) {
    from_codes(vld1q_s8(block->codes + first), block->scale, a, b);
  }
  static void from_codes(int8x16_t codes, std::uint16_t f16, Vec& a, Vec& b) {
    const float32x4_t scale = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(f16)));
    a = scaled(vmovl_s8(vget_low_s8(codes)), scale);
    b = scaled(vmovl_high_s8(codes), scale);
  }
  static Vec scaled(int16x8_t codes, float32x4_t scale) {
    return {vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes))), scale),
            vmulq_f32(vcvtq_f32_s32(vmovl_high_s16(codes)), scale)};
  }
};

template <>
struct Simd::Elements<KvFormat::q4_0> {
  using Stored = shared::Q4Block;
  static constexpr bool kEvenOdd = false;
  /// `first` is 0, the low nibbles, or 16, the high ones.
  static void load_pair(const Stored* block, int first, Vec& a, Vec& b) {
    const uint8x16_t shifted = vshlq_u8(vld1q_u8(block->codes), vdupq_n_s8(static_cast<std::int8_t>(-first / 4)));
    const int8x16_t nibbles = vreinterpretq_s8_u8(vandq_u8(shifted, vdupq_n_u8(15)));
    Elements<KvFormat::q8_0>::from_codes(vsubq_s8(nibbles, vdupq_n_s8(8)), block->scale, a, b);
  }
};

/// MLX's codes: 16 of them, of one group.
template <>
struct Simd::Elements<KvFormat::mlx_int8> {
  using Stored = std::uint8_t;
  static constexpr bool kEvenOdd = false;
  static void load_pair(const Stored* codes, float scale, float bias, Vec& a, Vec& b) {
    from_codes(vld1q_u8(codes), scale, bias, a, b);
  }
  static void from_codes(uint8x16_t codes, float scale, float bias, Vec& a, Vec& b) {
    a = fmadd(widen(vmovl_u8(vget_low_u8(codes))), broadcast(scale), broadcast(bias));
    b = fmadd(widen(vmovl_high_u8(codes)), broadcast(scale), broadcast(bias));
  }
  static Vec widen(uint16x8_t codes) {
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(codes))), vcvtq_f32_u32(vmovl_high_u16(codes))};
  }
};

template <>
struct Simd::Elements<KvFormat::mlx_int4> {
  using Stored = std::uint8_t;
  static constexpr bool kEvenOdd = false;
  /// Low and high nibbles of eight bytes zipped: in order again.
  static void load_pair(const Stored* codes, float scale, float bias, Vec& a, Vec& b) {
    const uint8x8_t bytes = vld1_u8(codes);
    const uint8x8x2_t nibbles = vzip_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4));
    Elements<KvFormat::mlx_int8>::from_codes(vcombine_u8(nibbles.val[0], nibbles.val[1]), scale, bias, a, b);
  }
};
