// The sampled grid of tools/conformance on the emulated bodies, and its exact-answer suite.
#include "grid.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "emulated_case.hpp"

namespace kvonce::emulation {
namespace {

using conformance::CaseResult;
using conformance::CaseSpec;
using conformance::Random;

// The grid's case in the types and dims of a kernel.
CaseSpec fit(const CaseSpec& from, const AttendKernel& kernel) {
  CaseSpec spec = from;
  Problem& p = spec.problem;
  p.q_dtype = kernel.dtype;
  p.out_dtype = kernel.dtype;
  p.k_format = static_cast<KvFormat>(kernel.dtype);
  p.v_format = p.k_format;
  p.head_dim_qk = kernel.head_dim_qk;
  p.head_dim_v = kernel.head_dim_v;
  p.v_is_k_prefix = p.v_is_k_prefix && kernel.head_dim_v < kernel.head_dim_qk;
  if (spec.seed % 2 == 0) spec = with_score_rules(spec);
  if (spec.problem.mask == MaskKind::tree || spec.problem.has_mask_slopes) spec.problem.mask = MaskKind::boolean;
  spec.problem.has_mask_slopes = false;
  if (spec.problem.mask == MaskKind::additive && spec.problem.mask_dtype != DType::f32) {
    spec.problem.mask_dtype = kernel.dtype;
  }
  if (spec.problem.mask != MaskKind::additive) spec.problem.mask_dtype = DType::f32;
  if (spec.problem.mask == MaskKind::boolean && from.problem.mask != MaskKind::boolean) spec.mask_value = {};
  return spec;
}

TEST(MetalGridTest, EveryKernelAgreesWithTheOracle) {
  constexpr std::size_t kCasesPerKernel = 5;
  const auto kernels = attend_kernels();
  std::vector<CaseSpec> cases;
  for (std::uint64_t seed = 7; cases.size() < kernels.size() * kCasesPerKernel; ++seed) {
    const auto more = conformance::grid_cases({seed, kernels.size() * kCasesPerKernel - cases.size(), 6e5});
    ASSERT_FALSE(more.empty());
    cases.insert(cases.end(), more.begin(), more.end());
  }
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const AttendKernel& kernel = kernels[i % kernels.size()];
    const CaseSpec spec = fit(cases[i], kernel);
    if (!conformance::is_wanted(spec.name)) continue;
    Random random(spec.seed);
    const Choice choice = random_choice(spec.problem, spec.problem.max_kv_len, spec.options.chunk_tokens, kernel.body,
                                        kernel.row_tile, random);
    const CaseResult result = check_emulated(spec, choice);
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

INSTANTIATE_TEST_SUITE_P(Bodies, MetalExactTest, testing::Values(Body::vector, Body::matrix, Body::per_head),
                         [](const testing::TestParamInfo<Body>& body) { return std::string(to_string(body.param)); });

}  // namespace
}  // namespace kvonce::emulation
