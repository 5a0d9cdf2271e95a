// Tests that run once per CPU target; on a target that this machine cannot run they are skipped with the reason.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "run_case.hpp"

namespace kvonce::conformance {

class TargetTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (!device().unavailable.empty()) GTEST_SKIP() << "not run: " << device().unavailable;
  }

  [[nodiscard]] static const Device& device() { return GetParam(); }
  /// KVONCE_QUICK=1: fewer repeats, for sanitizer builds.
  [[nodiscard]] static bool quick() { return level_from_environment() == Level::quick; }

  /// Plans and runs the case; its results in logical order, for bitwise comparison.
  [[nodiscard]] static std::vector<unsigned char> result_bytes(const CaseSpec& spec, const Context& context = {}) {
    const Plan plan = plan_case(spec, device());
    CaseTensors tensors(spec);
    EXPECT_EQ(run_case(plan, spec, tensors, context), "") << spec.name;
    return tensors.result_bytes();
  }

  static void expect_oracle(const CaseSpec& spec) {
    const CaseResult result = check_oracle(spec, device());
    EXPECT_EQ(result.status, CaseResult::passed) << spec.name << ' ' << result.kernel_id << ' ' << result.detail;
  }
};

inline std::vector<Device> cpu_devices() {
  std::vector<Device> found;
  for (const Device& device : devices()) {
    if (device.backend == Backend::cpu) found.push_back(device);
  }
  return found;
}

inline std::string target_name(const testing::TestParamInfo<Device>& info) { return info.param.target; }

#define KVONCE_ON_EVERY_TARGET(suite) \
  INSTANTIATE_TEST_SUITE_P(Cpu, suite, testing::ValuesIn(cpu_devices()), target_name)

/// 3 sequences of different lengths, two or more KV heads, a group that is not the number of KV heads.
inline CaseSpec typical(std::int64_t q_len = 2, KvFormat format = KvFormat::f32, std::int64_t dim = 64,
                        std::int64_t group = 5, std::int64_t kv_heads = 2) {
  CaseSpec spec;
  Problem& p = spec.problem;
  p.num_seqs = 3;
  p.num_kv_heads = kv_heads;
  p.num_q_heads = group * kv_heads;
  p.head_dim_qk = dim;
  p.head_dim_v = dim;
  p.q_len = q_len;
  p.max_kv_len = 200;
  p.q_dtype = static_cast<DType>(format);
  p.k_format = format;
  p.v_format = format;
  spec.kv_lens = {197, 0, 66};
  spec.num_threads = 2;
  spec.name = "d" + std::to_string(dim) + " q=" + std::to_string(q_len) + " " + std::string(to_string(format));
  return spec;
}

inline constexpr KvFormat kPlainFormats[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16};

}  // namespace kvonce::conformance
