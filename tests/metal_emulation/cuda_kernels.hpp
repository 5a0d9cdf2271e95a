// The kernel bodies compiled for CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "launch.hpp"

namespace kvonce::emulation {

/// Enqueue the kernels of a launch on the default stream; every pointer is device memory. Throw Error{Unsupported} for an
/// instance that is not compiled, Error{Internal} when the launch fails.
void enqueue_attend(const Launch& launch, const AttendArgs& args);
void enqueue_merge(const Launch& launch, const MergeArgs& args);

using CudaAttend = void (*)(AttendArgs);
using CudaMerge = void (*)(MergeArgs);

/// The seed's geometries in f16 (cuda_kernels_seed.cu) and the rest (cuda_kernels_rest.cu); null: not there.
CudaAttend find_seed_attend(const Instance& instance);
CudaAttend find_other_attend(const Instance& instance);
CudaMerge find_seed_merge(DType dtype, int head_dim_v);
CudaMerge find_other_merge(DType dtype, int head_dim_v);

}  // namespace kvonce::emulation
