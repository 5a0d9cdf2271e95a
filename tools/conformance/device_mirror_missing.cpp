// In a build without CUDA: no case reaches a device, because no plan for one can run.
#include "device_mirror.hpp"

namespace kvonce::conformance {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::Unavailable, "conformance: no CUDA in this build, so no case can run on a CUDA device");
}

}  // namespace

const std::string& device_failure() {
  static const std::string kNone;
  return kNone;
}

DeviceCase::DeviceCase(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, void* stream)
    : plan_(plan), spec_(spec), tensors_(tensors), stream_(stream) {
  refuse();
}
DeviceCase::~DeviceCase() = default;
void DeviceCase::prepare() { refuse(); }
void DeviceCase::reset_outputs() { refuse(); }
void DeviceCase::attend() { refuse(); }
void DeviceCase::wait() { refuse(); }
void DeviceCase::check() { refuse(); }
void DeviceCase::upload() { refuse(); }
std::string DeviceCase::fetch() { refuse(); }

void wait_for_stream(void*, const std::string&) { refuse(); }

std::string run_device_case(const Plan&, const CaseSpec&, CaseTensors&, const Context&) { refuse(); }

}  // namespace kvonce::conformance
