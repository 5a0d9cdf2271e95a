// The options that several subcommands share: which backend, which target, how many threads, which policy.
#pragma once

#include <string>

#include "kvonce/plan.hpp"

namespace kvonce::tool {

struct DeviceOptions {
  Backend backend = Backend::cpu;
  std::string target;   // empty: the best one, or KVONCE_CPU_TARGET
  int num_threads = 0;  // 0: all CPUs, or KVONCE_NUM_THREADS
  std::string policy;   // "key=value,..." or a policy file; empty: that of KVONCE_POLICY, or chosen
};

/// The device they name. Throws Error like default_device() and cuda_device(), and Error{InvalidArgument} for a target or
/// a number of threads with backend cuda.
Device choose_device(const DeviceOptions& options);

/// The policy: "key=value,..." itself, or the policy file that a text without '=' or "@FILE" names. Throws
/// Error{InvalidArgument} naming --policy.
PlanOptions plan_options(const DeviceOptions& options);

}  // namespace kvonce::tool
