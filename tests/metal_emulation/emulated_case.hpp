// Conformance cases on the emulated bodies.
#pragma once

#include <string>

#include "case_tensors.hpp"
#include "cases.hpp"
#include "conformance.hpp"
#include "run_case.hpp"
#include "run_launch.hpp"

namespace kvonce::emulation {

/// A body's name as a test parameter and what may be chosen freely for it.
struct BodyDevice {
  static Body of(const Device& device);
  static Device device(Body body);
};

/// Resets the outputs, runs and copies the packed results into the case's out and lse. Returns what was written outside its
/// place, or an empty string.
std::string run_emulated(const conformance::CaseSpec& spec, conformance::CaseTensors& tensors, const Choice& choice);

/// Runs and judges against the oracle.
conformance::CaseResult check_emulated(const conformance::CaseSpec& spec, const Choice& choice);

}  // namespace kvonce::emulation

namespace kvonce::conformance {

// tools/conformance/exact.cpp compiled once more, with these in place of its own (CMakeLists.txt renames them): the same
// suite on the emulated bodies. Device::target names the body; what the bodies do not serve is skipped.
std::vector<CaseResult> run_exact_emulated(const Device& device, Level level, const OnResult& on_result = {});
CaseResult check_exact_emulated(const CaseSpec& spec, const Device& device, const ExpectedFn& expected,
                                Weights weights = Weights::zero_or_one);
Plan plan_case_emulated(const CaseSpec& spec, const Device& device);
std::string run_case_emulated(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors,
                              const Context& context = {});

}  // namespace kvonce::conformance
