// The only file that sees every backend.
#include "kvonce/kvonce.hpp"

#include "core/backend.hpp"
#include "cpu/backend.hpp"
#include "cuda/backend.hpp"
#include "metal/backend.hpp"

namespace kvonce {

const core::BackendTable& core::backend_table(Backend backend) {
  switch (backend) {
    case Backend::cpu:
      return cpu::backend();
    case Backend::cuda:
      return cuda::backend();
    case Backend::metal:
      return metal::backend();
  }
  throw Error(ErrorCode::InvalidArgument,
              "device.backend: got a value outside the enumeration, allowed: cpu, cuda, metal");
}

std::vector<Device> devices() {
  std::vector<Device> all;
  for (const Backend backend : {Backend::cpu, Backend::cuda, Backend::metal}) {
    for (Device& device : core::backend_table(backend).devices()) all.push_back(std::move(device));
  }
  return all;
}

Device default_device() { return cpu::default_device(); }
Device cuda_device(int ordinal) { return cuda::device(ordinal); }
std::uint64_t cuda_capture_id(void* stream, int ordinal) { return cuda::capture_id(stream, ordinal); }
void cuda_retain_in_capture(void* stream, int ordinal, void (*release)(void*), void* object) {
  cuda::retain_in_capture(stream, ordinal, release, object);
}
Device metal_device(std::string_view target, int num_cores) { return metal::device(target, num_cores); }
Device cpu_device(std::string_view target, int num_threads) { return cpu::device(target, num_threads); }

}  // namespace kvonce
