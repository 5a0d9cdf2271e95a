#include "baselines/make_target.hpp"
#include "cpu/simd/avx2.hpp"

namespace kvonce::bench {

extern const TargetKernels kAvx2Kernels;
constinit const TargetKernels kAvx2Kernels = make_target<cpu::avx2::Simd, Bits32>();

}  // namespace kvonce::bench
