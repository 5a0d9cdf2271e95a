// The options that several subcommands share: which backend, which target, how many threads, which policy.
#pragma once

#include <string>

#include "kvonce/plan.hpp"

namespace kvonce::tool {

struct DeviceOptions {
  Backend backend = Backend::cpu;
  std::string target;   // empty: the best one, or KVONCE_CPU_TARGET; Metal: apple7, the least that every GPU has
  int num_threads = 0;  // 0: all CPUs, or KVONCE_NUM_THREADS
  int num_cores = 0;    // Metal: of the GPU to plan for; 0: unknown
  std::string policy;   // "key=value,..." or a policy file; empty: that of KVONCE_POLICY, or chosen
};

/// The device they name; with backend metal a GPU that they describe. Throws Error like default_device(), cuda_device() and
/// metal_device(), and Error{InvalidArgument} for an option that is another backend's.
Device choose_device(const DeviceOptions& options);

/// The policy: "key=value,..." itself, or the policy file that a text without '=' or "@FILE" names. Throws
/// Error{InvalidArgument} naming --policy.
PlanOptions plan_options(const DeviceOptions& options);

}  // namespace kvonce::tool
