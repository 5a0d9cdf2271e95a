// The seed's geometries, loops unrolled as on Metal: what is counted.
#include "cuda_kernels.cuh"

namespace kvonce::emulation {
namespace {

const AttendKernel kAttend[] = {
#define KVONCE_METAL_SEED_DIMS(qk, v) KVONCE_METAL_ATTEND_DIMS(qk, v)
#include "instances.def"
    // Group 1 and 2.
    KVONCE_METAL_ATTEND_VECTOR(half, 64, 64, 1) KVONCE_METAL_ATTEND_VECTOR(half, 128, 128, 1)};
const MergeKernel kMerge[] = {
#define KVONCE_METAL_SEED_DIMS(qk, v) KVONCE_METAL_MERGE(half, qk, v)
#include "instances.def"
};

}  // namespace

CudaAttend find_seed_attend(const Instance& instance) {
  for (const AttendKernel& one : kAttend) {
    if (one.instance == instance) return one.kernel;
  }
  return nullptr;
}

CudaMerge find_seed_merge(DType dtype, int head_dim_v) {
  for (const MergeKernel& one : kMerge) {
    if (one.dtype == dtype && one.head_dim_v == head_dim_v) return one.kernel;
  }
  return nullptr;
}

}  // namespace kvonce::emulation
