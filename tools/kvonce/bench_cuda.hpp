// kvonce bench on a CUDA device: graphs of calls over rotating buffers, the arms interleaved round by round.
#pragma once

#include "kvonce/bench_run.hpp"

namespace kvonce::tool {

/// As run_bench(), for a settings.device of the CUDA backend. Throws Error{Unavailable} in a build without CUDA.
BenchOutcome run_cuda_bench(const BenchSettings& settings);

}  // namespace kvonce::tool
