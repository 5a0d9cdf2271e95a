// Runs one case and judges it.
#pragma once

#include <functional>
#include <string>

#include "case_tensors.hpp"
#include "conformance.hpp"
#include "core/reference.hpp"

namespace kvonce::conformance {

/// The case's plan on a device, with the case's number of threads. Errors as make_plan().
Plan plan_case(const CaseSpec& spec, const Device& device);

/// What the id of the kernel that serves the case must contain: "attend_<target>_" and "_d64x64_" or "_dany_".
bool kernel_id_fits(const Plan& plan, std::string* expected);

/// Resets the outputs and runs the plan with a workspace of exactly plan.workspace_bytes() bytes full of NaN, at an
/// alignment that depends on the case's seed. Returns what was written outside its place, or an empty string.
std::string run_case(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, const Context& context = {});

/// Empty, or the first element that is outside the tolerance (docs of judge_oracle in run_case.cpp), NaN included.
std::string judge_oracle(const CaseSpec& spec, const CaseTensors& tensors, const core::ReferenceResult& oracle,
                         double* rel_rms_error);

/// What out must be: (seq, q_head, row, dim).
using ExpectedFn = std::function<double(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;

/// Empty, or the first element that differs from `expected` rounded to out_dtype (float32: by more than 1e-6 relative).
std::string judge_exact(const CaseSpec& spec, const CaseTensors& tensors, const ExpectedFn& expected);

/// Plans, runs and judges against the oracle. A case that the backend refuses has failed.
CaseResult check_oracle(const CaseSpec& spec, const Device& device);
CaseResult check_exact(const CaseSpec& spec, const Device& device, const ExpectedFn& expected);

}  // namespace kvonce::conformance
