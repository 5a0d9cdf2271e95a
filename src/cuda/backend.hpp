// The CUDA backend's entry points. plan() is always built; the rest answers Unavailable in a build without CUDA.
#pragma once

#include "core/backend.hpp"

namespace kvonce::cuda {

const core::BackendTable& backend();

/// Throws Error{Unavailable}.
Device device(int ordinal);

/// core::BackendTable::plan. Integers only: needs neither the CUDA runtime nor a device.
void plan(core::PlanData& data, const PlanOptions& options);

}  // namespace kvonce::cuda
