#include "kvonce/device_options.hpp"

#include <fmt/format.h>

#include <fstream>
#include <sstream>

namespace kvonce::tool {
namespace {

// The settings of a policy file as one "key=value,..." line.
std::string read_policy_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw Error(ErrorCode::InvalidArgument,
                fmt::format("--policy: '{}' is neither key=value,... nor a file that can be read", path));
  }
  std::string settings;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    for (char& c : line) {
      if (c == ',' || c == '\t' || c == '\r') c = ' ';
    }
    std::istringstream words(line);
    for (std::string word; words >> word;) settings += (settings.empty() ? "" : ",") + word;
  }
  if (file.bad()) throw Error(ErrorCode::InvalidArgument, fmt::format("--policy: '{}' cannot be read", path));
  return settings;
}

}  // namespace

Device choose_device(const DeviceOptions& options) {
  Device device = options.target.empty() ? default_device() : cpu_device(options.target, options.num_threads);
  if (options.target.empty() && options.num_threads > 0) device = cpu_device(device.target, options.num_threads);
  return device;
}

PlanOptions plan_options(const DeviceOptions& options) {
  PlanOptions plan_options;
  if (options.policy.empty()) return plan_options;
  const bool is_inline = options.policy.find('=') != std::string::npos;
  const std::string settings = is_inline ? options.policy : read_policy_file(options.policy);
  try {
    plan_options.policy = parse_policy(settings);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("--policy: {}", error.what()));
  }
  return plan_options;
}

}  // namespace kvonce::tool
