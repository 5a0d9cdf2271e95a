#include "cpu/backend.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string>

#include "core/refuse.hpp"
#include "cpu/features.hpp"
#include "cpu/targets.hpp"

namespace kvonce::cpu {
namespace {

Device describe(std::string_view target, const CacheSizes& caches) {
  Device device;
  device.backend = Backend::cpu;
  device.target = std::string(target);
  device.name = processor_name();
  device.l1_bytes = caches.l1_bytes;
  device.l2_bytes = caches.l2_bytes;
  device.l3_bytes = caches.l3_bytes;
  device.fetches_line_pairs = fetches_line_pairs();
  device.fast_pair_dot = has_fast_pair_dot();
  device.follows_prefetches = follows_prefetches();
  device.unavailable = find_target(target) == nullptr
                           ? "target " + std::string(target) + ": not built for this architecture"
                           : missing_feature(target);
  return device;
}

/// One per name of kTargetNames, with one thread. The processor and the system's files are asked once: a cpuid alone takes
/// microseconds in a virtual machine.
const std::vector<Device>& described() {
  static const std::vector<Device> all = [] {
    const CacheSizes caches = cache_sizes();
    std::vector<Device> devices;
    for (const char* name : kTargetNames) devices.push_back(describe(name, caches));
    return devices;
  }();
  return all;
}

const Device* find_described(std::string_view target) {
  for (const Device& device : described()) {
    if (target == device.target) return &device;
  }
  return nullptr;
}

int threads_from_environment() {
  const char* text = std::getenv("KVONCE_NUM_THREADS");
  if (text == nullptr || *text == '\0') return usable_cpus();
  int count = 0;
  const std::string_view view(text);
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), count);
  if (error != std::errc() || end != view.data() + view.size() || count < 1 || count > core::kMaxThreads) {
    core::refuse(ErrorCode::InvalidArgument, "KVONCE_NUM_THREADS", "'" + std::string(view) + "'",
                 "1 to " + std::to_string(core::kMaxThreads));
  }
  return count;
}

std::vector<Device> all_devices() {
  std::vector<Device> devices = described();
  for (Device& device : devices) device.num_threads = usable_cpus();
  return devices;
}

}  // namespace

const Target* find_target(std::string_view name) {
  const Target* const built[] = {
#if defined(KVONCE_X86)
    &avx512_bf16::kTarget,
    &avx512::kTarget,
    &avx2::kTarget,
#elif defined(KVONCE_AARCH64)
    &neon_bf16::kTarget,
    &neon::kTarget,
#endif
    &portable::kTarget
  };
  for (const Target* target : built) {
    if (name == target->name) return target;
  }
  return nullptr;
}

Device device(std::string_view target, int num_threads) {
  const Device* const known = find_described(target);
  if (known == nullptr) {
    core::refuse(ErrorCode::InvalidArgument, "target", "'" + std::string(target) + "'", kTargetList);
  }
  if (num_threads < 0 || num_threads > core::kMaxThreads) {
    core::refuse(ErrorCode::InvalidArgument, "num_threads", std::to_string(num_threads),
                 "0 (all CPUs of this process) to " + std::to_string(core::kMaxThreads));
  }
  if (num_threads == 0) num_threads = threads_from_environment();
  if (!known->unavailable.empty()) throw Error(ErrorCode::Unavailable, known->unavailable);
  Device found = *known;
  found.num_threads = num_threads;
  return found;
}

Device default_device() {
  const char* forced = std::getenv("KVONCE_CPU_TARGET");
  if (forced != nullptr && *forced != '\0') {
    if (find_described(forced) == nullptr) {
      core::refuse(ErrorCode::InvalidArgument, "KVONCE_CPU_TARGET", "'" + std::string(forced) + "'", kTargetList);
    }
    return device(forced, 0);
  }
  const auto usable = std::find_if(described().begin(), described().end(),
                                   [](const Device& device) { return device.unavailable.empty(); });
  return device(usable->target, 0);  // portable runs everywhere
}

const core::BackendTable& backend() {
  static constexpr core::BackendTable kTable = {Backend::cpu, all_devices, plan, run, nullptr, nullptr};
  return kTable;
}

}  // namespace kvonce::cpu
