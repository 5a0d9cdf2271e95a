// Two query heads over one key whose value is 3: attention over a single key returns that value.
#include <iostream>
#include <kvonce/kvonce.hpp>
#include <vector>

int main() {
  kvonce::Problem problem;
  problem.num_q_heads = 2;
  problem.num_kv_heads = 1;
  problem.head_dim_qk = 64;
  problem.max_kv_len = 1;
  const kvonce::Plan plan = kvonce::make_plan(problem);

  const std::vector<float> q(128, 1.0F);
  const std::vector<float> k(64, 0.5F);
  const std::vector<float> v(64, 3.0F);
  std::vector<float> out(128, 0.0F);
  kvonce::Inputs inputs;
  inputs.q = {q.data(), 128, 64, 64};
  inputs.k = {k.data(), 64, 64, 64};
  inputs.v = {v.data(), 64, 64, 64};
  kvonce::Outputs outputs;
  outputs.out = out.data();
  outputs.out_seq_stride = 128;
  outputs.out_head_stride = 64;
  outputs.out_token_stride = 64;
  std::vector<unsigned char> workspace(plan.workspace_bytes());
  kvonce::attend(plan, inputs, outputs, workspace.data(), workspace.size());

  // An error crosses the library's border as the same type.
  problem.num_q_heads = 0;
  try {
    (void)kvonce::make_plan(problem);
    return 1;
  } catch (const kvonce::Error& error) {
    if (error.code() != kvonce::ErrorCode::InvalidArgument) return 1;
  }
  std::cout << "kvonce " << kvonce::version() << ": out " << out[127] << "\n";
  return 0;
}
