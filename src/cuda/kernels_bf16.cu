#include "cuda/kernels_mma.cuh"

namespace kvonce::cuda {

const void* mma_kernel_bf16(Join join, int head_dim_qk, int head_dim_v, int row_tiles) {
  return mma_address<bf16>(join, head_dim_qk, head_dim_v, row_tiles);
}

}  // namespace kvonce::cuda
