#include "baselines/make_target.hpp"
#include "cpu/simd/neon.hpp"

namespace kvonce::bench {

extern const TargetKernels kNeonKernels;
constinit const TargetKernels kNeonKernels = make_target<cpu::neon::Simd, Bits32>();

}  // namespace kvonce::bench
