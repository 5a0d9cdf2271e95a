// The CUDA backend's entry points. plan() is always built; the rest answers Unavailable in a build without CUDA.
#pragma once

#include "core/backend.hpp"

namespace kvonce::cuda {

const core::BackendTable& backend();

/// Throws Error{Unavailable}.
Device device(int ordinal);

/// As kvonce::cuda_capture_id and kvonce::cuda_retain_in_capture.
std::uint64_t capture_id(void* stream, int ordinal);
void retain_in_capture(void* stream, int ordinal, void (*release)(void*), void* object);

/// core::BackendTable::plan. Integers only: needs neither the CUDA runtime nor a device.
void plan(core::PlanData& data, const PlanOptions& options);

}  // namespace kvonce::cuda
