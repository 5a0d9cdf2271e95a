#include "cuda/kernels_mma.cuh"

namespace kvonce::cuda {

const void* mma_kernel_bf16(const MmaInstance& choice) { return mma_address<bf16>(choice); }

}  // namespace kvonce::cuda
