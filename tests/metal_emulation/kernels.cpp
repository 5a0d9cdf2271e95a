// The shipped body files, compiled as C++. This file alone is compiled with the load-counting instrumentation.
#include "kernels.hpp"

#include "dialect_host.h"
// After the dialect.
#include "body_arguments.hpp"

namespace kvonce::emulation {
namespace {

kvonce_metal::Place place_of(const ThreadPlace& p) { return {p.x, p.y, p.z, p.simdgroup, p.lane}; }

template <typename T, int kDimQk, int kDimV, int kRows>
void run_vector(const AttendArgs& args, float* shared, const ThreadPlace& place) {
  kvonce_metal::attend_vector<T, kDimQk, kDimV, kRows>(buffers_of<T>(args), shared, place_of(place));
}
template <typename T, int kDimQk, int kDimV>
void run_matrix(const AttendArgs& args, float* shared, const ThreadPlace& place) {
  kvonce_metal::attend_matrix<T, kDimQk, kDimV>(buffers_of<T>(args), shared, place_of(place));
}
template <typename T, int kDimQk, int kDimV>
void run_per_head(const AttendArgs& args, float* shared, const ThreadPlace& place) {
  kvonce_metal::attend_per_head<T, kDimQk, kDimV>(buffers_of<T>(args), shared, place_of(place));
}
template <typename T, int kDimQk, int kDimV, int kRows, int kBits, int kGroup>
void run_affine_vector(const AttendArgs& args, float* shared, const ThreadPlace& place) {
  kvonce_metal::attend_affine_vector<T, kDimQk, kDimV, kRows, kBits, kGroup>(
      buffers_of<T>(args), affine_k<T>(args), affine_v<T>(args), shared, place_of(place));
}
template <typename T, int kDimQk, int kDimV, int kBits, int kGroup>
void run_affine_matrix(const AttendArgs& args, float* shared, const ThreadPlace& place) {
  kvonce_metal::attend_affine_matrix<T, kDimQk, kDimV, kBits, kGroup>(buffers_of<T>(args), affine_k<T>(args),
                                                                      affine_v<T>(args), shared, place_of(place));
}
template <typename T, int kDimV>
void run_merge(const MergeArgs& a, float* shared, const ThreadPlace& place) {
  kvonce_metal::merge_partials<T, kDimV>({a.partial_o, a.partial_sums, a.sinks, a.params}, static_cast<T*>(a.out),
                                         a.lse, shared, place_of(place));
}

struct AttendKernel {
  Instance instance;
  RunAttend run;
};

constexpr AttendKernel kAttend[] = {
#define KVONCE_METAL_VECTOR(T, qk, v, rows) {{Body::vector, kDType<T>, qk, v, rows}, run_vector<T, qk, v, rows>},
#define KVONCE_METAL_OTHER(T, qk, v)                                   \
  {{Body::matrix, kDType<T>, qk, v, 8}, run_matrix<T, qk, v>},         \
      {{Body::per_head, kDType<T>, qk, v, 1}, run_per_head<T, qk, v>}, \
      {{Body::vector, kDType<T>, qk, v, 8}, run_vector<T, qk, v, 8>},
#define KVONCE_METAL_DIMS(qk, v) \
  KVONCE_METAL_OTHER(half, qk, v){{Body::vector, kDType<half>, qk, v, 4}, run_vector<half, qk, v, 4>},
#define KVONCE_METAL_AFFINE(T, qk, v, rows, bits, group)                                                 \
  {{Body::vector, kDType<T>, qk, v, rows, bits, group}, run_affine_vector<T, qk, v, rows, bits, group>}, \
      {{Body::matrix, kDType<T>, qk, v, 8, bits, group}, run_affine_matrix<T, qk, v, bits, group>},
#include "instances.def"
};

struct MergeKernel {
  DType dtype;
  int head_dim_v;
  RunMerge run;
};

constexpr MergeKernel kMerge[] = {
#define KVONCE_METAL_OTHER(T, qk, v) {kDType<T>, v, run_merge<T, v>},
#define KVONCE_METAL_DIMS(qk, v) KVONCE_METAL_OTHER(half, qk, v)
#include "instances.def"
};

}  // namespace

RunAttend attend_kernel(const Instance& instance) {
  for (const AttendKernel& kernel : kAttend) {
    if (kernel.instance == instance) return kernel.run;
  }
  throw Error(ErrorCode::Unsupported, "instances.def has no " + instance.name());
}

RunMerge merge_kernel(DType dtype, int head_dim_v) {
  for (const MergeKernel& kernel : kMerge) {
    if (kernel.dtype == dtype && kernel.head_dim_v == head_dim_v) return kernel.run;
  }
  throw Error(ErrorCode::Unsupported, "instances.def has no merge of d" + std::to_string(head_dim_v));
}

}  // namespace kvonce::emulation
