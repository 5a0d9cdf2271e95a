// The oracle's verdict on what `kvonce run` computed.
#pragma once

#include "kvonce/attend.hpp"
#include "kvonce/problem.hpp"

namespace kvonce::tool {

struct CheckResult {
  double rel_rms_error = 0.0;  // root of sum((out - oracle)^2) / sum(oracle^2); not divided when the oracle is all 0
  double max_error = 0.0;      // largest |out - oracle|
  double max_lse_error = 0.0;  // largest |lse - oracle's lse|
  double tolerance = 0.0;      // rel_rms_error allowed
  double lse_tolerance = 0.0;  // |lse - oracle's lse| allowed, times the larger of 1 and |lse|
  bool passed = false;
};

/// The relative RMS error that the check allows: float32 accumulation against double precision (2e-6 when everything is
/// f32, 1e-5 with f16 or bf16 K and V), or half a unit in the last place of a 16-bit out (2^-11 for f16, 2^-8 for bf16).
double allowed_rel_rms_error(const Problem& problem);

/// Compares packed `out` and `lse` with core::reference_attend on the same inputs, one KV stream at a time on all CPUs.
/// K and V are plain and strided; the problem has no mask arrays, sinks or segments.
CheckResult check_against_oracle(const Problem& problem, const Inputs& inputs, const void* out, const float* lse);

}  // namespace kvonce::tool
