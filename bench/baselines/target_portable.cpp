#include "baselines/make_target.hpp"
#include "cpu/simd/portable.hpp"

namespace kvonce::bench {

extern const TargetKernels kPortableKernels;
constinit const TargetKernels kPortableKernels = make_target<cpu::portable::Simd, Bits16>();

}  // namespace kvonce::bench
