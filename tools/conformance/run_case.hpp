// Runs one case and judges it.
#pragma once

#include <functional>
#include <string>

#include "case_tensors.hpp"
#include "conformance.hpp"
#include "core/reference.hpp"

namespace kvonce::conformance {

/// False for a case that KVONCE_ONLY=TEXT in the environment leaves out: its name does not contain TEXT.
bool is_wanted(const std::string& name);

/// The case's plan on a device, with the case's number of threads. CUDA splits at multiples of 16 tokens: chunk_tokens is
/// rounded up. Errors as make_plan().
Plan plan_case(const CaseSpec& spec, const Device& device);

/// What the id of the kernel that serves the case must contain: "attend_<target>_" and "_d64x64_" or "_dany_".
bool kernel_id_fits(const Plan& plan, std::string* expected);

/// What the CUDA backend says it serves. A case beyond it may be refused with Unsupported; any other refusal is a fault.
bool cuda_serves(const Problem& problem);

/// Unit roundoff of the type in which the kernel that serves these inputs multiplies probabilities with V: CUDA's
/// tensor-core kernel rounds them to the cache's 16-bit type, every other kernel keeps float32 (0).
double weight_roundoff(const Plan& plan, const Inputs& inputs);

/// Resets the outputs and runs the plan with a workspace of exactly plan.workspace_bytes() bytes full of NaN, at an
/// alignment that depends on the case's seed. On a CUDA device: in its memory, prepared, two runs (device_mirror.hpp).
/// Returns what was written outside its place, or an empty string.
std::string run_case(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, const Context& context = {});

/// Empty, or the first element that is outside the tolerance (docs of judge_oracle in run_case.cpp), NaN included.
/// u_p is weight_roundoff().
std::string judge_oracle(const CaseSpec& spec, const CaseTensors& tensors, const core::ReferenceResult& oracle,
                         double* rel_rms_error, double u_p = 0.0);

/// What out must be: (seq, q_head, row, dim).
using ExpectedFn = std::function<double(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;

/// Empty, or the first element that differs from `expected` rounded to out_dtype (float32: by more than 1e-6 relative).
/// u_p > 0: by more than rounding each probability so and the output may add.
std::string judge_exact(const CaseSpec& spec, const CaseTensors& tensors, const ExpectedFn& expected, double u_p = 0.0);

/// Whether every probability of an exact-answer case, relative to its row's largest, is 0 or 1: then no kernel rounds it.
enum class Weights { zero_or_one, any };

/// Plans, runs and judges against the oracle. A case that the backend refuses has failed; skipped is one that the CUDA
/// backend refuses and does not claim to serve (cuda_serves).
CaseResult check_oracle(const CaseSpec& spec, const Device& device);
CaseResult check_exact(const CaseSpec& spec, const Device& device, const ExpectedFn& expected,
                       Weights weights = Weights::zero_or_one);

}  // namespace kvonce::conformance
