// The Metal backend's entry points: plans for an Apple GPU that the caller describes. Plain C++, always built.
#pragma once

#include <string_view>

#include "core/backend.hpp"

namespace kvonce::metal {

const core::BackendTable& backend();

/// As kvonce::metal_device.
Device device(std::string_view target, int num_cores);

}  // namespace kvonce::metal
