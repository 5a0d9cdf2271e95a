// Tests that need a CUDA device; without one they are skipped with the reason.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/reference.hpp"
#include "device_mirror.hpp"
#include "run_case.hpp"

#define ASSERT_CUDA(call)                                                   \
  do {                                                                      \
    const cudaError_t cuda_status = (call);                                 \
    ASSERT_EQ(cuda_status, cudaSuccess) << cudaGetErrorString(cuda_status); \
  } while (false)

namespace kvonce::cuda_test {

using conformance::CaseSpec;
using conformance::CaseTensors;
using conformance::DeviceCase;

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!device().unavailable.empty()) GTEST_SKIP() << "no device: " << device().unavailable;
    if (!conformance::device_failure().empty()) {
      GTEST_SKIP() << "not run: the device is unusable since " << conformance::device_failure();
    }
  }

  /// The first CUDA device of this machine, or what says why there is none.
  static const Device& device() {
    static const Device kFound = [] {
      for (const Device& device : devices()) {
        if (device.backend == Backend::cuda) return device;
      }
      return Device();
    }();
    return kFound;
  }

  static void expect_oracle(const CaseSpec& spec) {
    const conformance::CaseResult result = conformance::check_oracle(spec, device());
    EXPECT_EQ(result.status, conformance::CaseResult::passed)
        << spec.name << ' ' << to_string(spec.options.policy) << ' ' << result.kernel_id << ' ' << result.detail;
  }

  /// Bytes of the results of one run in a new workspace.
  static std::vector<unsigned char> result_bytes(const CaseSpec& spec) {
    const Plan plan = conformance::plan_case(spec, device());
    CaseTensors tensors(spec);
    EXPECT_EQ(conformance::run_case(plan, spec, tensors), "") << spec.name;
    return tensors.result_bytes();
  }

  /// Copies to the device in the order of the case's stream.
  static cudaError_t put(const DeviceCase& on_device, const void* to, const void* from, std::size_t bytes) {
    return cudaMemcpyAsync(const_cast<void*>(to), from, bytes, cudaMemcpyHostToDevice,
                           static_cast<cudaStream_t>(on_device.stream()));
  }
  static cudaError_t put_lengths(const DeviceCase& on_device, const std::vector<std::int32_t>& kv_lens) {
    return put(on_device, on_device.inputs().kv_lens, kv_lens.data(), 4 * kv_lens.size());
  }

  /// The tensors' results against the oracle, for lengths other than the case's own.
  static std::string judge_lengths(const Plan& plan, const CaseSpec& spec, const CaseTensors& tensors,
                                   const std::vector<std::int32_t>& kv_lens) {
    CaseSpec now = spec;
    now.kv_lens = kv_lens;
    Inputs inputs = tensors.inputs();
    inputs.kv_lens = kv_lens.data();
    const auto oracle = core::reference_attend(spec.problem, inputs);
    double error = 0.0;
    return conformance::judge_oracle(now, tensors, oracle, &error,
                                     conformance::weight_roundoff(plan, tensors.inputs()));
  }
};

/// A stream of its own that does not wait for the default one.
class Stream {
 public:
  Stream() { status_ = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~Stream() {
    if (stream_ != nullptr && conformance::device_failure().empty()) cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cudaError_t status() const { return status_; }
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaError_t status_;
};

/// Device memory until the end of the scope.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) { status_ = cudaMalloc(&data_, bytes); }
  ~DeviceBytes() {
    if (data_ != nullptr && conformance::device_failure().empty()) cudaFree(data_);
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  [[nodiscard]] cudaError_t status() const { return status_; }
  [[nodiscard]] unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_ = nullptr;
  cudaError_t status_;
};

/// The ways in which a stream's blocks can split and join, and whether the result has the inputs' type: then one query token
/// of up to 8 heads is plain decode, with kernels of its own.
struct JoinKind {
  const char* name;
  Policy policy;
  bool same_type = false;

  void apply(CaseSpec& spec) const {
    spec.options.policy = policy;
    if (same_type) spec.problem.out_dtype = spec.problem.q_dtype;
  }
};
inline std::vector<JoinKind> join_kinds() {
  const auto make = [](std::int64_t cluster, std::int64_t splits, std::int64_t join_blocks, std::int64_t chunk) {
    Policy policy;
    policy.cluster = cluster;
    policy.splits = splits;
    policy.join_blocks = join_blocks;
    policy.chunk_tokens = chunk;
    return policy;
  };
  return {{"chosen", {}},
          {"cluster", make(1, 0, 0, 0)},
          {"workspace", make(0, 0, 0, 0)},
          {"one block", make(0, 1, 0, 0)},
          {"13 splits, 3 joiners", make(0, 13, 3, 0)},
          {"chunks of 16", make(-1, 0, 0, 16)},
          {"2 splits, 1 joiner", make(0, 2, 1, 0)},
          {"same type, chosen", {}, true},
          {"same type, cluster", make(1, 0, 0, 0), true},
          {"same type, cluster of 3", make(1, 3, 0, 0), true},
          {"same type, workspace", make(0, 0, 0, 0), true},
          {"same type, one block", make(0, 1, 0, 0), true},
          {"same type, 13 splits, 3 joiners", make(0, 13, 3, 0), true},
          {"same type, 2 splits, 1 joiner", make(0, 2, 1, 0), true}};
}

/// One sequence of kv_len tokens, K, V and q of one type, float32 out: the sharpest tolerance.
inline CaseSpec make_case(KvFormat format, std::int64_t dim, std::int64_t group, std::int64_t kv_heads,
                          std::int64_t kv_len, std::int64_t q_len = 1) {
  CaseSpec spec;
  Problem& p = spec.problem;
  p.num_seqs = 1;
  p.num_kv_heads = kv_heads;
  p.num_q_heads = group * kv_heads;
  p.head_dim_qk = dim;
  p.head_dim_v = dim;
  p.q_len = q_len;
  p.max_kv_len = kv_len;
  p.q_dtype = static_cast<DType>(format);
  p.out_dtype = DType::f32;
  p.k_format = format;
  p.v_format = format;
  spec.kv_lens = {static_cast<std::int32_t>(kv_len)};
  spec.seed = static_cast<std::uint64_t>(dim + 3 * kv_len + 7 * group);
  spec.name = std::to_string(p.num_q_heads) + "q/" + std::to_string(kv_heads) + "kv d" + std::to_string(dim) +
              " kv=" + std::to_string(kv_len) + " q=" + std::to_string(q_len) + " " + std::string(to_string(format));
  return spec;
}

}  // namespace kvonce::cuda_test
