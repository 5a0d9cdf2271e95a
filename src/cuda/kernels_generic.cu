#include "cuda/attend_generic.cuh"
#include "cuda/cuda_plan.hpp"
#include "cuda/kernels.hpp"

namespace kvonce::cuda {
namespace {

// Tickets are zero, partials are empty; the header comes last so that it never vouches for less.
__global__ void prepare(std::uint32_t* words, std::int64_t first_partial, std::int64_t end) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = kHeaderWords + static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < end;
       i += stride) {
    words[i] = i < first_partial ? 0U : kEmptyWord;
  }
  if (blockIdx.x == 0 && threadIdx.x < kHeaderWords) words[threadIdx.x] = threadIdx.x == 0 ? kPreparedWord : 0U;
}

template <int kRows, int kParts>
const void* address() {
  return reinterpret_cast<const void*>(&attend_generic<kRows, kParts, kWarps>);
}

}  // namespace

const void* generic_kernel(int largest_dim) {
  if (largest_dim <= 128) return address<8, 1>();
  if (largest_dim <= 256) return address<4, 2>();
  if (largest_dim <= 512) return address<2, 4>();
  return address<1, 8>();
}

const void* prepare_kernel() { return reinterpret_cast<const void*>(&prepare); }

}  // namespace kvonce::cuda
