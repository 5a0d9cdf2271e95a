#include "kvonce/device_options.hpp"

#include <fmt/format.h>

#include <memory>

#include "kvonce/policy_file.hpp"

namespace kvonce::tool {

Device choose_device(const DeviceOptions& options) {
  if (options.num_cores > 0 && options.backend != Backend::metal) {
    throw Error(ErrorCode::InvalidArgument, "--cores: is for backend metal; leave it out without --backend metal");
  }
  if (options.backend == Backend::metal) {
    if (options.num_threads > 0) {
      throw Error(ErrorCode::InvalidArgument, "--threads: is for backend cpu; leave it out with --backend metal");
    }
    return metal_device(options.target.empty() ? "apple7" : options.target, options.num_cores);
  }
  if (options.backend == Backend::cuda) {
    if (!options.target.empty() || options.num_threads > 0) {
      throw Error(ErrorCode::InvalidArgument, fmt::format("{}: is for backend cpu; leave it out with --backend cuda",
                                                          options.target.empty() ? "--threads" : "--target"));
    }
    return cuda_device();
  }
  Device device = options.target.empty() ? default_device() : cpu_device(options.target, options.num_threads);
  if (options.target.empty() && options.num_threads > 0) device = cpu_device(device.target, options.num_threads);
  return device;
}

PlanOptions plan_options(const DeviceOptions& options) {
  PlanOptions plan_options;
  const std::string& given = options.policy;
  if (given.empty()) return plan_options;
  try {
    if (given.front() == '@' || given.find('=') == std::string::npos) {
      plan_options.policy_file =
          std::make_shared<PolicyFile>(load_policy_file(given.front() == '@' ? given.substr(1) : given));
    } else {
      plan_options.policy = parse_policy(given);
    }
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("--policy: {}", error.what()));
  }
  return plan_options;
}

}  // namespace kvonce::tool
