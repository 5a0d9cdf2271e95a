#include "cuda/kernels_mma.cuh"

namespace kvonce::cuda {

const void* mma_kernel_f16(const MmaInstance& choice) { return mma_address<f16>(choice); }

}  // namespace kvonce::cuda
