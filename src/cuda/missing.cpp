// The backend in a build without CUDA: plans can be made (for a device that is described by hand), nothing runs.
#include "cuda/backend.hpp"

namespace kvonce::cuda {
namespace {

constexpr const char* kMissing =
    "backend cuda: not in this build of kvonce (configure with -D KVONCE_CUDA=ON where nvcc 12.8 or newer is "
    "installed); "
    "use backend cpu";

std::vector<Device> devices() {
  Device device;
  device.backend = Backend::cuda;
  device.unavailable = kMissing;
  return {device};
}

void attend_nowhere(const core::PlanData&, const Inputs&, const Outputs&, void*, const Context&) {
  throw Error(ErrorCode::Unavailable, kMissing);
}
void nowhere(const core::PlanData&, void*, const Context&) { throw Error(ErrorCode::Unavailable, kMissing); }

}  // namespace

Device device(int) { throw Error(ErrorCode::Unavailable, kMissing); }
std::uint64_t capture_id(void*, int) { throw Error(ErrorCode::Unavailable, kMissing); }
void retain_in_capture(void*, int, void (*)(void*), void*) { throw Error(ErrorCode::Unavailable, kMissing); }

const core::BackendTable& backend() {
  static constexpr core::BackendTable kTable = {Backend::cuda, devices, plan, attend_nowhere, nowhere, nowhere};
  return kTable;
}

}  // namespace kvonce::cuda
