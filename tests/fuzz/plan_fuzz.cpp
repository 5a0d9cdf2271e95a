// Fuzz entry of make_plan: the bytes choose a problem, a device and options (plan_problems.hpp).
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "plan_problems.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<kvonce::Device> known = kvonce::fuzz::known_devices();
  kvonce::fuzz::ByteChoices choices(std::span(data, size));
  const kvonce::fuzz::Trial trial = kvonce::fuzz::try_plan(choices, known);
  if (trial.fault.empty()) return 0;
  std::fprintf(stderr, "%s\n  %s\n", trial.fault.c_str(), trial.describe().c_str());
  std::abort();
}
