#include "baselines/target_kernels.hpp"

#include <string>

namespace kvonce::bench {

extern const TargetKernels kPortableKernels;
#if defined(KVONCE_BENCH_X86)
extern const TargetKernels kAvx2Kernels;
extern const TargetKernels kAvx512Kernels;
extern const TargetKernels kAvx512Bf16Kernels;
#elif defined(KVONCE_BENCH_AARCH64)
extern const TargetKernels kNeonKernels;
extern const TargetKernels kNeonBf16Kernels;
#endif

const TargetKernels& target_kernels(std::string_view target) {
  static const TargetKernels* const kAll[] = {
    &kPortableKernels,
#if defined(KVONCE_BENCH_X86)
    &kAvx2Kernels,
    &kAvx512Kernels,
    &kAvx512Bf16Kernels,
#elif defined(KVONCE_BENCH_AARCH64)
    &kNeonKernels,
    &kNeonBf16Kernels,
#endif
  };
  for (const TargetKernels* kernels : kAll) {
    if (kernels->target == target) return *kernels;
  }
  throw Error(ErrorCode::Unavailable, "target: no baselines are built in for '" + std::string(target) + "'");
}

}  // namespace kvonce::bench
