// plan_random [COUNT [SEED]]: random problems through make_plan. Built with UBSan in the asan preset, an overflow on the
// way is a failure too. Exit code 0, or 1 with the first failing problems.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "plan_problems.hpp"

int main(int argc, char** argv) {
  const long count = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 100000;
  const long seed = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 1;
  const std::vector<kvonce::Device> known = kvonce::fuzz::known_devices();
  kvonce::fuzz::SeededChoices choices(static_cast<std::uint64_t>(seed));
  long by_refusal[5] = {};  // [0]: planned
  long wrong = 0;
  for (long i = 0; i < count; ++i) {
    const kvonce::fuzz::Trial trial = kvonce::fuzz::try_plan(choices, known);
    ++by_refusal[trial.refusal <= 4 ? trial.refusal : 4];
    if (trial.fault.empty()) continue;
    ++wrong;
    if (wrong <= 20) std::printf("FAILED #%ld: %s\n  %s\n", i, trial.fault.c_str(), trial.describe().c_str());
  }
  std::printf("%ld problems: %ld planned, %ld invalid, %ld unsupported, %ld unavailable, %ld wrong\n", count,
              by_refusal[0], by_refusal[1], by_refusal[2], by_refusal[3], wrong);
  // Both sides must have been exercised.
  const bool balanced = by_refusal[0] * 4 > count && by_refusal[1] * 10 > count;
  if (!balanced) std::printf("FAILED: too few problems were valid, or too few were not\n");
  return wrong == 0 && balanced ? EXIT_SUCCESS : EXIT_FAILURE;
}
