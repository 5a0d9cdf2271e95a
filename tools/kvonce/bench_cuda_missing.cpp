// kvonce bench --backend cuda in a build without CUDA.
#include "kvonce/bench_cuda.hpp"

namespace kvonce::tool {

BenchOutcome run_cuda_bench(const BenchSettings& settings) {
  (void)cuda_device(settings.device.ordinal);  // throws the backend's reason
  throw Error(ErrorCode::Unavailable, "backend cuda: not in this build of kvonce; use backend cpu");
}

}  // namespace kvonce::tool
