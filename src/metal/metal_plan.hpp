// What a plan of this backend holds.
#pragma once

#include "core/plan_data.hpp"
#include "metal/policy.hpp"

namespace kvonce::metal {

struct MetalPlan : core::BackendPlan {
  Decision decision;
};

}  // namespace kvonce::metal
