#include "baselines/make_target.hpp"
#include "cpu/simd/neon_bf16.hpp"

namespace kvonce::bench {
namespace {

using Simd = cpu::neon_bf16::Simd;
constexpr int kMaddsPerDot = 2 * Simd::width;  // BFDOT: two products per lane

// The multiply-add loop with bf16 pairs: sum = sum + a . b in every lane of every chain.
float run_bf16_madds(std::int64_t iterations) {
  volatile std::uint16_t source = 0x3c00;  // 0.0078125
  std::uint16_t values[kMaddsPerDot];
  for (std::uint16_t& value : values) value = source;
  const Simd::Pairs factors = Simd::load_pairs(values);
  Simd::Vec sums[kMaddChains];
  KVONCE_UNROLL
  for (int c = 0; c < kMaddChains; ++c) sums[c] = Simd::broadcast(static_cast<float>(c));  // equal chains would be one
  for (std::int64_t i = 0; i < iterations; ++i) {
    KVONCE_UNROLL
    for (int c = 0; c < kMaddChains; ++c) sums[c] = Simd::dot_pairs(sums[c], factors, factors);
  }
  float result = 0.0F;
  for (const Simd::Vec& sum : sums) {
    float lanes[Simd::width];
    Simd::store(lanes, sum);
    for (const float lane : lanes) result += lane;
  }
  return result;
}

constexpr TargetKernels make_with_dot() {
  TargetKernels kernels = make_target<Simd, Bits32>();
  kernels.madd_bf16 = {run_bf16_madds, kMaddChains * kMaddsPerDot, kMaddsPerDot};
  return kernels;
}

}  // namespace

extern const TargetKernels kNeonBf16Kernels;
constinit const TargetKernels kNeonBf16Kernels = make_with_dot();

}  // namespace kvonce::bench
