// The smallest whole program in C++: one decode step of a layer with 32 query heads on 4 KV heads.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "kvonce/kvonce.hpp"

int main() {
  try {
    const kvonce::Problem problem{.num_q_heads = 32, .num_kv_heads = 4, .head_dim_qk = 128, .max_kv_len = 4096};
    const kvonce::Plan plan = kvonce::make_plan(problem);
    std::printf("%s\n", plan.explain().c_str());

    // A cache of 1000 tokens so far. Equal keys give equal weights, so each output value is the mean of 0..999.
    const std::int32_t kv_len = 1000;
    std::vector<float> q(32 * 128, 1.0F);
    std::vector<float> k(static_cast<std::size_t>(4) * 4096 * 128, 0.5F);
    std::vector<float> v(static_cast<std::size_t>(4) * 4096 * 128);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 128 % 4096);
    std::vector<float> out(32 * 128);
    std::vector<std::byte> workspace(plan.workspace_bytes());

    kvonce::Inputs inputs;
    inputs.q = {.data = q.data(), .seq_stride = 32 * 128, .head_stride = 128, .token_stride = 128};
    inputs.k = {.data = k.data(), .seq_stride = 4 * 4096 * 128, .head_stride = 4096 * 128, .token_stride = 128};
    inputs.v = {.data = v.data(), .seq_stride = 4 * 4096 * 128, .head_stride = 4096 * 128, .token_stride = 128};
    inputs.kv_lens = &kv_len;
    kvonce::Outputs outputs;
    outputs.out = out.data();
    outputs.out_seq_stride = 32 * 128;
    outputs.out_head_stride = 128;
    outputs.out_token_stride = 128;
    kvonce::attend(plan, inputs, outputs, workspace.data(), workspace.size());

    const float expected = 999.0F / 2;
    std::printf("out[0] = %.3f, expected %.3f\n", static_cast<double>(out[0]), static_cast<double>(expected));
    for (const float value : out) {
      if (value < expected - 0.01F || value > expected + 0.01F) return 1;
    }
  } catch (const kvonce::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
