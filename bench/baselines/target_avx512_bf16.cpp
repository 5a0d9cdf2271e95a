#include "baselines/make_target.hpp"
#include "cpu/simd/avx512_bf16.hpp"

namespace kvonce::bench {

extern const TargetKernels kAvx512Bf16Kernels;
constinit const TargetKernels kAvx512Bf16Kernels = make_target<cpu::avx512_bf16::Simd, Bits64>();

}  // namespace kvonce::bench
