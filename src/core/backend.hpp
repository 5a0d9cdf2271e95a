// The table every backend registers. Only src/kvonce.cpp sees them all.
#pragma once

#include <vector>

#include "core/plan_data.hpp"
#include "kvonce/attend.hpp"

namespace kvonce::core {

struct BackendTable {
  Backend backend;

  /// The devices of this backend, usable or not (Device::unavailable says why not).
  std::vector<Device> (*devices)();

  /// Refuses with Error{Unsupported or Unavailable}, or fills data's policy, kernel_id, chunks and workspace.
  /// data.problem is valid and resolved, data.device and options are as given.
  void (*plan)(PlanData& data, const PlanOptions& options);

  /// Runs. Inputs and outputs have been checked against the problem.
  void (*attend)(const PlanData& data, const Inputs& inputs, const Outputs& outputs, void* workspace,
                 const Context& context);

  /// As kvonce::prepare_workspace and kvonce::check_workspace. Null: nothing to do.
  void (*prepare_workspace)(const PlanData& data, void* workspace, const Context& context);
  void (*check_workspace)(const PlanData& data, void* workspace, const Context& context);
};

const BackendTable& backend_table(Backend backend);

}  // namespace kvonce::core
