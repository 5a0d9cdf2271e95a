// Every other instance. Loops stay loops, so that compiling takes minutes rather than an hour: only results are looked at.
#define KVONCE_METAL_KEEP_LOOPS
#include "cuda_kernels.cuh"

namespace kvonce::emulation {
namespace {

const AttendKernel kAttend[] = {
#define KVONCE_METAL_SEED_DIMS(qk, v)
#define KVONCE_METAL_DIMS(qk, v) KVONCE_METAL_ATTEND_DIMS(qk, v)
#define KVONCE_METAL_VECTOR(T, qk, v, rows) KVONCE_METAL_ATTEND_VECTOR(T, qk, v, rows)
#define KVONCE_METAL_OTHER(T, qk, v) KVONCE_METAL_ATTEND_OTHER(T, qk, v)
#define KVONCE_METAL_AFFINE(T, qk, v, rows, bits, group) KVONCE_METAL_ATTEND_AFFINE(T, qk, v, rows, bits, group)
#include "instances.def"
};
const MergeKernel kMerge[] = {
#define KVONCE_METAL_SEED_DIMS(qk, v)
#define KVONCE_METAL_DIMS(qk, v) KVONCE_METAL_MERGE(half, qk, v)
#define KVONCE_METAL_OTHER(T, qk, v) KVONCE_METAL_MERGE(T, qk, v)
#include "instances.def"
};

}  // namespace

CudaAttend find_other_attend(const Instance& instance) {
  for (const AttendKernel& one : kAttend) {
    if (one.instance == instance) return one.kernel;
  }
  return nullptr;
}

CudaMerge find_other_merge(DType dtype, int head_dim_v) {
  for (const MergeKernel& one : kMerge) {
    if (one.dtype == dtype && one.head_dim_v == head_dim_v) return one.kernel;
  }
  return nullptr;
}

}  // namespace kvonce::emulation
