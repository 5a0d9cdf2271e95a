// The first lanes of a vector as stored values, one at a time: what a target's store_as does with a part of a vector.
#pragma once

#include <cstdint>

#include "kvonce/types.hpp"
#include "shared/numeric.h"

namespace kvonce::cpu {

/// `lanes` is indexed like an array of floats. Internal linkage: each target's translation unit owns its copy.
template <DType dtype, class Lanes>
static void store_lanes(void* p, const Lanes& lanes, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (dtype == DType::f32) static_cast<float*>(p)[i] = lanes[i];
    if constexpr (dtype == DType::f16) static_cast<std::uint16_t*>(p)[i] = shared::f32_to_f16(lanes[i]);
    if constexpr (dtype == DType::bf16) static_cast<std::uint16_t*>(p)[i] = shared::f32_to_bf16(lanes[i]);
  }
}

}  // namespace kvonce::cpu
