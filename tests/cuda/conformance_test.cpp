// The cases of `kvonce check --backend cuda`. KVONCE_QUICK=1 and KVONCE_NIGHTLY=1 as elsewhere.
#include <algorithm>
#include <cstdio>
#include <map>

#include "device_test.hpp"

namespace kvonce::cuda_test {
namespace {

using conformance::CaseResult;

class ConformanceTest : public DeviceTest {
 protected:
  // Reports the first failures in full, and how many there are of each kernel.
  static void expect_passed(const std::vector<CaseResult>& results) {
    constexpr int kMostReported = 25;
    std::map<std::string, int> failed_by_kernel;
    int num_failed = 0;
    int num_passed = 0;
    double worst = 0.0;
    for (const CaseResult& result : results) {
      num_passed += result.status == CaseResult::passed ? 1 : 0;
      worst = std::max(worst, result.rel_rms_error);
      if (result.status != CaseResult::failed) continue;
      ++failed_by_kernel[result.kernel_id];
      if (++num_failed <= kMostReported)
        ADD_FAILURE() << result.name << "\n  " << result.kernel_id << "\n  " << result.detail;
    }
    for (const auto& [kernel, count] : failed_by_kernel) ADD_FAILURE() << count << " cases of " << kernel << " failed";
    EXPECT_GT(num_passed, 100) << "of " << results.size();
    std::printf("%d of %zu cases passed, largest relative rms error %.3g\n", num_passed, results.size(), worst);
  }
};

TEST_F(ConformanceTest, Grid) { expect_passed(conformance::run_grid(device(), conformance::level_from_environment())); }

TEST_F(ConformanceTest, Exact) {
  expect_passed(conformance::run_exact(device(), conformance::level_from_environment()));
}

}  // namespace
}  // namespace kvonce::cuda_test
