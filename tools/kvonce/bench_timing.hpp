// How arms are timed: cold buffers in turn, arms interleaved round by round.
#pragma once

#include <cstdint>
#include <vector>

#include "kvonce/bench_arms.hpp"
#include "kvonce/case_string.hpp"
#include "kvonce/plan.hpp"

namespace kvonce::tool {

/// Microseconds of a clock that only goes forward.
double now_us();

/// Of at least one value.
double median(std::vector<double> values);

/// Bytes that the sets of a case cover at least, so that caches do not help: 512 MiB, or four last-level caches.
std::int64_t rotation_bytes(const Device& device);

/// The problem of a case: q as K and V are stored. On the CPU out is float32, so that the error is the kernel's own and
/// not the rounding of the result; on CUDA it is stored like q, as models have it and peers are measured.
/// Throws Error{InvalidArgument} for one that has nothing to time.
Problem timed_problem(const CaseSpec& spec, KvFormat dtype, Backend backend = Backend::cpu);

/// The sets of a case in turn, across everything that is timed.
class Rotation {
 public:
  explicit Rotation(std::int64_t num_sets) : num_sets_(num_sets) {}
  std::int64_t next() {
    set_ = (set_ + 1) % num_sets_;
    return set_;
  }

 private:
  std::int64_t num_sets_;
  std::int64_t set_ = -1;
};

struct RoundLimits {
  std::int64_t min_rounds = 1;
  std::int64_t max_rounds = 1;
  double seconds = 0.0;  // no further round after so long, from min_rounds on
};

/// Microseconds of every round, per arm. Round by round, each arm once per round on the next set, a different arm first
/// each time: drift of the machine and what an arm leaves behind in the caches hit all arms alike.
std::vector<std::vector<double>> time_arms(const std::vector<Arm>& arms, const RoundLimits& limits, Rotation& rotation);

}  // namespace kvonce::tool
