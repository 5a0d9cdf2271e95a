#include "kvonce/bench_timing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "core/validate.hpp"

namespace kvonce::tool {
namespace {

constexpr std::int64_t kMinRotationBytes = std::int64_t{512} * 1024 * 1024;
constexpr std::int64_t kCachesRotated = 4;

}  // namespace

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.0;
}

std::int64_t rotation_bytes(const Device& device) {
  const std::int64_t last_level = std::max({device.l1_bytes, device.l2_bytes, device.l3_bytes});
  return std::max(kMinRotationBytes, kCachesRotated * last_level);
}

Problem timed_problem(const CaseSpec& spec, KvFormat dtype, Backend backend) {
  Problem problem = to_problem(spec, dtype, default_q_dtype(spec.dtype.value_or(dtype)));
  if (backend == Backend::cpu && problem.out_dtype == DType::f16) problem.out_dtype = DType::f32;
  problem = core::validate(problem);
  if (problem.max_kv_len < 1 || problem.num_seqs < 1 || problem.q_len < 1) {
    throw Error(ErrorCode::InvalidArgument,
                fmt::format("case: kv=, q= and seqs= must be at least 1 to be timed, got '{}'", to_string(spec)));
  }
  return problem;
}

std::vector<std::vector<double>> time_arms(const std::vector<Arm>& arms, const RoundLimits& limits,
                                           Rotation& rotation) {
  std::vector<std::vector<double>> us(arms.size());
  for (const Arm& arm : arms) arm.run(rotation.next());
  const double start = now_us();
  for (std::int64_t round = 0; round < limits.max_rounds; ++round) {
    for (std::size_t i = 0; i < arms.size(); ++i) {
      const std::size_t arm = (i + static_cast<std::size_t>(round)) % arms.size();
      const std::int64_t set = rotation.next();
      const double begin = now_us();
      arms[arm].run(set);
      us[arm].push_back(now_us() - begin);
    }
    if (round + 1 >= limits.min_rounds && now_us() - start > limits.seconds * 1e6) break;
  }
  return us;
}

}  // namespace kvonce::tool
