// The kernel bodies compiled for CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "launch.hpp"

namespace kvonce::emulation {

/// Enqueue the kernels of a launch on the default stream; every pointer is device memory. Throw Error{Unsupported} for an
/// instance that is not compiled, Error{Internal} when the launch fails.
void enqueue_attend(const Launch& launch, const AttendArgs& args);
void enqueue_merge(const Launch& launch, const MergeArgs& args);

}  // namespace kvonce::emulation
