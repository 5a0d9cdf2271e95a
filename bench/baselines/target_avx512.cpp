#include "baselines/make_target.hpp"
#include "cpu/simd/avx512.hpp"

namespace kvonce::bench {

extern const TargetKernels kAvx512Kernels;
constinit const TargetKernels kAvx512Kernels = make_target<cpu::avx512::Simd, Bits64>();

}  // namespace kvonce::bench
