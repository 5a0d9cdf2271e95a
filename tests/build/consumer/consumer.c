/* Two query heads over one key whose value is 3: attention over a single key returns that value. */
#include <kvonce/kvonce.h>
#include <stdio.h>
#include <stdlib.h>

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, kvonce_last_error());
  return 1;
}

int main(void) {
  static float q[128], k[64], v[64], out[128];
  kvonce_problem problem;
  kvonce_inputs inputs;
  kvonce_outputs outputs;
  kvonce_plan* plan = NULL;
  size_t workspace_bytes = 0;
  void* workspace;
  int i;
  for (i = 0; i < 64; ++i) v[i] = 3.0F;

  if (kvonce_problem_init(&problem, sizeof problem) != KVONCE_OK) return failed("problem");
  problem.num_q_heads = 2;
  problem.num_kv_heads = 1;
  problem.head_dim_qk = 64;
  problem.max_kv_len = 1;
  if (kvonce_plan_create(&problem, NULL, 0, NULL, &plan) != KVONCE_OK) return failed("plan");
  if (kvonce_plan_workspace_bytes(plan, &workspace_bytes) != KVONCE_OK) return failed("workspace");
  workspace = malloc(workspace_bytes);

  if (kvonce_inputs_init(&inputs, sizeof inputs) != KVONCE_OK) return failed("inputs");
  inputs.q.data = q;
  inputs.q.seq_stride = 128;
  inputs.q.head_stride = 64;
  inputs.q.token_stride = 64;
  inputs.k = inputs.q;
  inputs.k.data = k;
  inputs.v = inputs.q;
  inputs.v.data = v;
  if (kvonce_outputs_init(&outputs, sizeof outputs) != KVONCE_OK) return failed("outputs");
  outputs.out = out;
  outputs.out_seq_stride = 128;
  outputs.out_head_stride = 64;
  outputs.out_token_stride = 64;
  if (kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL) != KVONCE_OK) return failed("attend");
  printf("kvonce %s: out %g\n", kvonce_version(), (double)out[127]);
  free(workspace);
  kvonce_plan_destroy(plan);
  return 0;
}
