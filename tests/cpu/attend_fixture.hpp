// One attention problem with its buffers, for the tests of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvonce/kvonce.hpp"

namespace kvonce {

// A problem large enough that attend uses every thread it may.
class AttendFixture {
 public:
  AttendFixture(std::int64_t kv_len, int num_threads, const PlanOptions& options = {}, std::int64_t window = 0)
      : plan_(make_plan(problem(kv_len, window), device(num_threads), options)) {
    std::uint32_t state = 1;
    const auto fill = [&state](std::vector<float>& values, std::int64_t count) {
      values.resize(static_cast<std::size_t>(count));
      for (float& x : values) {
        state = state * 1664525U + 1013904223U;
        x = static_cast<float>(state >> 8) * 0x1p-23F - 1.0F;
      }
    };
    fill(q_, kHeads * kGroup * kDim);
    fill(k_, kHeads * kv_len * kDim);
    fill(v_, kHeads * kv_len * kDim);
    inputs_.q = {q_.data(), 0, kDim, kDim};
    inputs_.k = {k_.data(), 0, kv_len * kDim, kDim};
    inputs_.v = {v_.data(), 0, kv_len * kDim, kDim};
    workspace_.resize(plan_.workspace_bytes());
  }

  /// The result of one call, in the fixture's own workspace.
  std::vector<float> attend_once(const Context& context = {}) { return attend_in(workspace_, context); }

  /// The same in another workspace of workspace_bytes(): several threads may each be in a call.
  std::vector<float> attend_in(std::vector<char>& workspace, const Context& context = {}) const {
    std::vector<float> out(q_.size(), std::numeric_limits<float>::quiet_NaN());
    Outputs outputs;
    outputs.out = out.data();
    outputs.out_head_stride = kDim;
    outputs.out_token_stride = kDim;
    attend(plan_, inputs_, outputs, workspace.data(), workspace.size(), context);
    return out;
  }

  [[nodiscard]] std::size_t workspace_bytes() const { return plan_.workspace_bytes(); }

 private:
  static constexpr std::int64_t kHeads = 4;
  static constexpr std::int64_t kGroup = 3;
  static constexpr std::int64_t kDim = 64;

  static Problem problem(std::int64_t kv_len, std::int64_t window) {
    Problem p;
    p.num_q_heads = kHeads * kGroup;
    p.num_kv_heads = kHeads;
    p.head_dim_qk = kDim;
    p.max_kv_len = kv_len;
    p.window = window;
    return p;
  }

  static Device device(int num_threads) {
    Device best = default_device();
    best.num_threads = num_threads;
    return best;
  }

  Plan plan_;
  std::vector<float> q_;
  std::vector<float> k_;
  std::vector<float> v_;
  std::vector<char> workspace_;
  Inputs inputs_;
};

}  // namespace kvonce
