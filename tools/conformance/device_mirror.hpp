// A case in the memory of a CUDA device: the same bytes, margins included, at the same places within a page.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "case_tensors.hpp"

namespace kvonce::conformance {

/// Why no case can run on the device any more (an earlier one hangs or has crashed it), or an empty string.
const std::string& device_failure();

/// Device memory holds a copy of a case's tensors and a workspace of exactly plan.workspace_bytes() bytes at an alignment
/// that depends on the case's seed; everything between them is 0xff. Memory and the default stream belong to the process
/// and are reused, so a case allocates nothing. Throws Error{Internal} for every call of the CUDA runtime that fails and
/// when a stream has not finished after 20 seconds. KVONCE_TRACE=1 in the environment names each case before it runs.
class DeviceCase {
 public:
  /// The plan's device must be current. `stream`: a cudaStream_t; null: the process's own. plan, spec and tensors outlive
  /// this.
  DeviceCase(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, void* stream = nullptr);
  ~DeviceCase();
  DeviceCase(const DeviceCase&) = delete;
  DeviceCase& operator=(const DeviceCase&) = delete;

  /// As the case's, with addresses of the device.
  [[nodiscard]] const Inputs& inputs() const { return inputs_; }
  [[nodiscard]] const Outputs& outputs() const { return outputs_; }
  [[nodiscard]] void* workspace() const { return workspace_; }
  [[nodiscard]] void* stream() const { return stream_; }

  void prepare();        // enqueues prepare_workspace()
  void reset_outputs();  // enqueues 0xff for out, lse and everything around them
  void attend();         // enqueues attend()
  void wait();           // for the stream
  void check();          // waits, then check_workspace()
  void upload();         // copies the inputs again, as they are now
  /// Waits and copies out and lse back into the case's tensors. Returns what was written outside its place, or nothing.
  [[nodiscard]] std::string fetch();

 private:
  struct Range {
    unsigned char* host;
    std::size_t bytes;
    unsigned char* device;
    bool is_output;
  };
  [[nodiscard]] void* translate(const void* pointer) const;
  [[nodiscard]] std::string workspace_margins();

  const Plan& plan_;
  const CaseSpec& spec_;
  CaseTensors& tensors_;
  void* stream_;
  std::vector<Range> ranges_;
  unsigned char* workspace_ = nullptr;
  unsigned char* workspace_begin_ = nullptr;  // of its margins
  unsigned char* workspace_end_ = nullptr;
  Inputs inputs_;
  Outputs outputs_;
};

/// Waits until everything on a cudaStream_t is done. Errors as DeviceCase; `what` names the work in the message.
void wait_for_stream(void* stream, const std::string& what);

/// run_case() on a CUDA device. The plan runs twice in one workspace: a workspace that the first run leaves dirty and a
/// result that does not repeat bit by bit are faults.
std::string run_device_case(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, const Context& context);

}  // namespace kvonce::conformance
