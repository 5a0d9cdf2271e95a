#include <immintrin.h>

#include "baselines/make_target.hpp"
#include "cpu/simd/avx512_bf16.hpp"

namespace kvonce::bench {
namespace {

constexpr int kMaddsPerDot = 32;  // VDPBF16PS: two products per lane

// The multiply-add loop with bf16 pairs: sum = sum + a . b in every lane of every chain.
float run_bf16_madds(std::int64_t iterations) {
  volatile int pair_source = 0x3c003c00;  // twice 0.0078125
  const __m512i pairs = _mm512_set1_epi32(pair_source);
  __m512bh factors;
  std::memcpy(&factors, &pairs, sizeof factors);
  __m512 sums[kMaddChains];
  KVONCE_UNROLL
  for (int c = 0; c < kMaddChains; ++c) sums[c] = _mm512_set1_ps(static_cast<float>(c));  // equal chains would be one
  for (std::int64_t i = 0; i < iterations; ++i) {
    KVONCE_UNROLL
    for (int c = 0; c < kMaddChains; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], factors, factors);
  }
  __m512 total = sums[0];
  KVONCE_UNROLL
  for (int c = 1; c < kMaddChains; ++c) total = _mm512_add_ps(total, sums[c]);
  return _mm512_reduce_add_ps(total);
}

constexpr TargetKernels make_with_dot() {
  TargetKernels kernels = make_target<cpu::avx512_bf16::Simd, Bits64>();
  kernels.madd_bf16 = {run_bf16_madds, kMaddChains * kMaddsPerDot, kMaddsPerDot};
  return kernels;
}

}  // namespace

extern const TargetKernels kAvx512Bf16Kernels;
constinit const TargetKernels kAvx512Bf16Kernels = make_with_dot();

}  // namespace kvonce::bench
