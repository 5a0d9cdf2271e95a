// The sampled grid of tools/conformance on the emulated bodies, and its exact-answer suite.
#include <gtest/gtest.h>

#include "emulated_case.hpp"

namespace kvonce::emulation {
namespace {

using conformance::CaseResult;

class MetalGridTest : public testing::TestWithParam<Body> {};

TEST_P(MetalGridTest, EveryInstanceAgreesWithTheOracle) {
  for (const GridCase& one : grid_cases(5, 6e5)) {
    if (one.choice.body != GetParam() || !conformance::is_wanted(one.spec.name)) continue;
    const CaseResult result = check_emulated(one.spec, one.choice);
    EXPECT_EQ(result.status, CaseResult::passed) << result.name << ": " << result.detail;
  }
}

class MetalExactTest : public testing::TestWithParam<Body> {};

TEST_P(MetalExactTest, InputsWithKnownAnswers) {
  const Device device = BodyDevice::device(GetParam());
  std::size_t passed = 0;
  for (const CaseResult& result : conformance::run_exact_emulated(device, conformance::Level::quick)) {
    // The one case that is refused rather than skipped: float32 results of a 16-bit cache.
    if (result.detail.find("refused: the Metal bodies do not serve: q, K, V and out differ in type") == 0) continue;
    EXPECT_NE(result.status, CaseResult::failed) << result.name << ": " << result.detail;
    passed += result.status == CaseResult::passed ? 1 : 0;
  }
  EXPECT_GE(passed, 150U);  // the rest is of dims or with features that the bodies do not serve
}

INSTANTIATE_TEST_SUITE_P(Bodies, MetalGridTest, testing::Values(Body::vector, Body::matrix, Body::per_head),
                         [](const testing::TestParamInfo<Body>& body) { return std::string(to_string(body.param)); });
INSTANTIATE_TEST_SUITE_P(Bodies, MetalExactTest, testing::Values(Body::vector, Body::matrix, Body::per_head),
                         [](const testing::TestParamInfo<Body>& body) { return std::string(to_string(body.param)); });

}  // namespace
}  // namespace kvonce::emulation
