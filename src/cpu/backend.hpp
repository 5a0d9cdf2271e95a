// The CPU backend as the rest of the library sees it.
#pragma once

#include <string_view>

#include "core/backend.hpp"

namespace kvonce::cpu {

struct Target;

const core::BackendTable& backend();

/// The best target this machine runs, or the one KVONCE_CPU_TARGET names; see kvonce::default_device().
Device default_device();
Device device(std::string_view target, int num_threads);

/// The code of a target by name; null when this build lacks it.
const Target* find_target(std::string_view name);

/// plan.cpp: chooses and fills in. run.cpp: runs.
void plan(core::PlanData& data, const PlanOptions& options);
void run(const core::PlanData& data, const Inputs& inputs, const Outputs& outputs, void* workspace,
         const Context& context);

}  // namespace kvonce::cpu
