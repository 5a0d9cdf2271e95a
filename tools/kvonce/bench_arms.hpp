// The arms of one case: what each runs, what it is called, and whether its result is right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "baselines/baselines.hpp"
#include "kvonce/bench_data.hpp"
#include "kvonce/case_string.hpp"
#include "kvonce/kvonce.hpp"

namespace kvonce::tool {

/// kvonce, per_head, read, qmv and on CUDA floor: the order in which they are reported.
const std::vector<std::string>& arm_names(Backend backend);
/// What --planned-kv-len adds: kvonce with the lengths in device memory, planned for the case's length and for the given one.
const std::vector<std::string>& planned_arm_names();
/// The arms of a chain: kvonce without and with PlanOptions::earlier_kv_ready.
const std::vector<std::string>& chain_arm_names();

struct Arm {
  std::string name;
  std::string kernel;
  std::int64_t read_factor = 1;
  std::function<void(std::int64_t set)> run;
  std::function<std::optional<double>()> error;  // of the last run, which must have been on set 0
  double max_error = 0.0;                        // above it the result is wrong
};

/// `data` outlives the arm. Throws Error{InvalidArgument, Unsupported} when the arm cannot serve the case.
Arm make_arm(std::string_view name, const CaseData& data, const Device& device, const PlanOptions& options,
             const bench::TargetKernels& kernels, const bench::ReadLoop& read_loop);

}  // namespace kvonce::tool
