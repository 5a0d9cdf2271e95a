#include "kvonce/device_options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
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

void add_device_options(CLI::App& command, DeviceOptions& options) {
  constexpr int kMaxThreads = 4096;
  command.add_option("--target", options.target, "Instruction-set target, see `kvonce devices` (default: the best)");
  command.add_option("--threads", options.num_threads, "Threads to use (default: all)")
      ->check(CLI::Range(1, kMaxThreads).description(""));
  command.add_option("--policy", options.policy, "Tunables: key=value,.. or a FILE of them, e.g. row_tile=4");
}

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
