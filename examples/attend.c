/* The smallest whole program in C: one decode step of a layer with 32 query heads on 4 KV heads. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvonce/kvonce.h"

enum { kNumQHeads = 32, kNumKvHeads = 4, kHeadDim = 128, kMaxKvLen = 4096 };

static float* new_floats(size_t count) {
  float* values = calloc(count, sizeof *values);
  if (values == NULL) exit(2);
  return values;
}

static void require_ok(kvonce_status status) {
  if (status == KVONCE_OK) return;
  fprintf(stderr, "kvonce status %d: %s\n", (int)status, kvonce_last_error());
  exit(2);
}

int main(void) {
  kvonce_problem problem;
  require_ok(kvonce_problem_init(&problem, sizeof problem));
  problem.num_q_heads = kNumQHeads;
  problem.num_kv_heads = kNumKvHeads;
  problem.head_dim_qk = kHeadDim;
  problem.max_kv_len = kMaxKvLen;

  kvonce_plan* plan = NULL;
  const char* kernel_id = NULL;
  size_t workspace_bytes = 0;
  require_ok(kvonce_plan_create(&problem, NULL, 0, NULL, &plan));
  require_ok(kvonce_plan_kernel_id(plan, &kernel_id));
  require_ok(kvonce_plan_workspace_bytes(plan, &workspace_bytes));

  /* A cache of 1000 tokens so far. Keys of 0 give equal weights, so each output value is the mean of 0..999. */
  const int32_t kv_len = 1000;
  const size_t cache_values = (size_t)kNumKvHeads * kMaxKvLen * kHeadDim;
  float* q = new_floats(kNumQHeads * kHeadDim);
  float* k = new_floats(cache_values);
  float* v = new_floats(cache_values);
  float* out = new_floats(kNumQHeads * kHeadDim);
  void* workspace = malloc(workspace_bytes);
  if (workspace == NULL && workspace_bytes > 0) exit(2);
  for (size_t i = 0; i < cache_values; ++i) v[i] = (float)(i / kHeadDim % kMaxKvLen);

  const int64_t cache_head_stride = (int64_t)kMaxKvLen * kHeadDim;
  kvonce_inputs inputs;
  kvonce_outputs outputs;
  require_ok(kvonce_inputs_init(&inputs, sizeof inputs));
  require_ok(kvonce_outputs_init(&outputs, sizeof outputs));
  inputs.q = (kvonce_tensor){q, kNumQHeads * kHeadDim, kHeadDim, kHeadDim};
  inputs.k = (kvonce_tensor){k, kNumKvHeads * cache_head_stride, cache_head_stride, kHeadDim};
  inputs.v = (kvonce_tensor){v, kNumKvHeads * cache_head_stride, cache_head_stride, kHeadDim};
  inputs.kv_lens = &kv_len;
  outputs.out = out;
  outputs.out_seq_stride = kNumQHeads * kHeadDim;
  outputs.out_head_stride = kHeadDim;
  outputs.out_token_stride = kHeadDim;
  require_ok(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL));

  const float expected = 999.0F / 2;
  int exit_code = 0;
  printf("kvonce %s, %s\nout[0] = %.3f, expected %.3f\n", kvonce_version(), kernel_id, (double)out[0],
         (double)expected);
  for (size_t i = 0; i < kNumQHeads * kHeadDim; ++i) {
    if (out[i] < expected - 0.01F || out[i] > expected + 0.01F) exit_code = 1;
  }

  kvonce_plan_destroy(plan);
  free(workspace);
  free(out);
  free(v);
  free(k);
  free(q);
  return exit_code;
}
