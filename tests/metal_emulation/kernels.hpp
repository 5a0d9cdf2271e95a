// The compiled instances of the kernel bodies, without their types.
#pragma once

#include "launch.hpp"

namespace kvonce::emulation {

using RunAttend = void (*)(const AttendArgs& args, float* shared, const ThreadPlace& place);
using RunMerge = void (*)(const MergeArgs& args, float* shared, const ThreadPlace& place);

/// What one lane runs. Throws Error{Unsupported} when instances.def has no such instance.
RunAttend attend_kernel(const Instance& instance);
RunMerge merge_kernel(DType dtype, int head_dim_v);

}  // namespace kvonce::emulation
