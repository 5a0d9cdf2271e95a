/* The C ABI from a C99 program: exact answers, statuses, messages, struct versions, untouched outputs.
 * usage: c_abi_test CASE, one of the names in `cases` below. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvonce/kvonce.h"

static int num_failures = 0;

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);              \
      fprintf(stderr, "  group %d, last error: %s\n", current_group, kvonce_last_error()); \
      ++num_failures;                                                                      \
    }                                                                                      \
  } while (0)

#define CHECK_OK(call) CHECK((call) == KVONCE_OK)

/* The call has this status, and its message holds this text. */
#define CHECK_REFUSED(call, status, text)               \
  do {                                                  \
    CHECK((call) == (status));                          \
    CHECK(strstr(kvonce_last_error(), (text)) != NULL); \
  } while (0)

static int current_group = 0;

enum { kSeqs = 2, kQLen = 2, kKvHeads = 2, kMaxGroup = 72, kHeadDim = 64, kKvLen = 100 };
enum { kMaxHeads = kKvHeads * kMaxGroup };
enum { kOutFloats = kSeqs * kMaxHeads * kQLen * kHeadDim, kLseFloats = kSeqs * kMaxHeads * kQLen };

static const float kPoison = -12345.0F;

static float q[kOutFloats];
static float k[kSeqs * kKvHeads * kKvLen * kHeadDim];
static float v[kSeqs * kKvHeads * kKvLen * kHeadDim];
static float out[kOutFloats];
static float lse[kLseFloats];
static int32_t kv_lens[kSeqs] = {kKvLen, 37};

/* With q = 0 every visible key weighs the same, so out is the mean of V. V is constant per sequence and KV head. */
static float value_of(int seq, int kv_head) { return (float)(1 + seq * kKvHeads + kv_head); }

static void fill_tensors(void) {
  int seq, head, i;
  memset(q, 0, sizeof q);
  for (seq = 0; seq < kSeqs; ++seq) {
    for (head = 0; head < kKvHeads; ++head) {
      for (i = 0; i < kKvLen * kHeadDim; ++i) {
        k[(seq * kKvHeads + head) * kKvLen * kHeadDim + i] = (float)(i % 17) - 8.0F;
        v[(seq * kKvHeads + head) * kKvLen * kHeadDim + i] = value_of(seq, head);
      }
    }
  }
}

static void poison_outputs(void) {
  int i;
  for (i = 0; i < kOutFloats; ++i) out[i] = kPoison;
  for (i = 0; i < kLseFloats; ++i) lse[i] = kPoison;
}

static int outputs_untouched(void) {
  int i;
  for (i = 0; i < kOutFloats; ++i) {
    if (out[i] != kPoison) return 0;
  }
  for (i = 0; i < kLseFloats; ++i) {
    if (lse[i] != kPoison) return 0;
  }
  return 1;
}

static kvonce_problem make_problem(int group_size) {
  kvonce_problem problem;
  CHECK_OK(kvonce_problem_init(&problem, sizeof problem));
  problem.num_seqs = kSeqs;
  problem.q_len = kQLen;
  problem.num_q_heads = kKvHeads * group_size;
  problem.num_kv_heads = kKvHeads;
  problem.head_dim_qk = kHeadDim;
  problem.max_kv_len = kKvLen;
  return problem;
}

static kvonce_inputs make_inputs(int group_size) {
  kvonce_inputs inputs;
  CHECK_OK(kvonce_inputs_init(&inputs, sizeof inputs));
  inputs.q.data = q;
  inputs.q.token_stride = kHeadDim;
  inputs.q.head_stride = kQLen * kHeadDim;
  inputs.q.seq_stride = (int64_t)kKvHeads * group_size * kQLen * kHeadDim;
  inputs.k.data = k;
  inputs.k.token_stride = kHeadDim;
  inputs.k.head_stride = kKvLen * kHeadDim;
  inputs.k.seq_stride = kKvHeads * kKvLen * kHeadDim;
  inputs.v = inputs.k;
  inputs.v.data = v;
  inputs.kv_lens = kv_lens;
  return inputs;
}

static kvonce_outputs make_outputs(int group_size) {
  kvonce_outputs outputs;
  CHECK_OK(kvonce_outputs_init(&outputs, sizeof outputs));
  outputs.out = out;
  outputs.out_token_stride = kHeadDim;
  outputs.out_head_stride = kQLen * kHeadDim;
  outputs.out_seq_stride = (int64_t)kKvHeads * group_size * kQLen * kHeadDim;
  outputs.lse = lse;
  outputs.lse_token_stride = 1;
  outputs.lse_head_stride = kQLen;
  outputs.lse_seq_stride = (int64_t)kKvHeads * group_size * kQLen;
  return outputs;
}

static void* allocate(size_t num_bytes) {
  void* memory = malloc(num_bytes > 0 ? num_bytes : 1);
  if (memory == NULL) {
    fprintf(stderr, "out of memory: %lu bytes\n", (unsigned long)num_bytes);
    exit(1);
  }
  return memory;
}

/* Causal, bottom-right: row i of a sequence sees kv_len - q_len + 1 + i keys. */
static void check_answers(int group_size) {
  int seq, head, row, dim;
  for (seq = 0; seq < kSeqs; ++seq) {
    for (head = 0; head < kKvHeads * group_size; ++head) {
      for (row = 0; row < kQLen; ++row) {
        const int row_idx = (seq * kKvHeads * group_size + head) * kQLen + row;
        const double num_keys = (double)(kv_lens[seq] - kQLen + 1 + row);
        const float expected = value_of(seq, head / group_size);
        int num_wrong = 0;
        for (dim = 0; dim < kHeadDim; ++dim) {
          if (!(fabsf(out[row_idx * kHeadDim + dim] - expected) <= 1e-6F * expected)) ++num_wrong;
        }
        CHECK(num_wrong == 0);
        CHECK(fabs((double)lse[row_idx] - log(num_keys)) <= 2e-6);
      }
    }
  }
}

static void test_groups(void) {
  for (current_group = 1; current_group <= kMaxGroup; ++current_group) {
    const kvonce_problem problem = make_problem(current_group);
    const kvonce_inputs inputs = make_inputs(current_group);
    const kvonce_outputs outputs = make_outputs(current_group);
    kvonce_plan* plan = NULL;
    size_t workspace_bytes = 0;
    int64_t read_factor = 0;
    void* workspace;
    CHECK_OK(kvonce_plan_create(&problem, NULL, 0, NULL, &plan));
    if (plan == NULL) continue;
    CHECK_OK(kvonce_plan_workspace_bytes(plan, &workspace_bytes));
    CHECK_OK(kvonce_plan_read_factor(plan, &read_factor));
    CHECK(read_factor >= 1);
    CHECK(current_group * kQLen > 32 || read_factor == 1);
    workspace = allocate(workspace_bytes);
    poison_outputs();
    CHECK_OK(kvonce_prepare_workspace(plan, workspace, workspace_bytes, NULL)); /* nothing to do on the CPU */
    CHECK_OK(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL));
    CHECK_OK(kvonce_check_workspace(plan, workspace, workspace_bytes, NULL));
    check_answers(current_group);
    free(workspace);
    kvonce_plan_destroy(plan);
  }
}

static void test_plan_arguments(void) {
  kvonce_plan* plan = NULL;
  kvonce_problem problem = make_problem(4);
  kvonce_options options;
  CHECK_REFUSED(kvonce_plan_create(NULL, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "problem");
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, NULL), KVONCE_INVALID_ARGUMENT, "plan");
  CHECK_REFUSED(kvonce_plan_create(&problem, "no_such_target", 0, NULL, &plan), KVONCE_INVALID_ARGUMENT,
                "no_such_target");
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, -1, NULL, &plan), KVONCE_INVALID_ARGUMENT, "num_threads");
  CHECK_REFUSED(kvonce_plan_create(&problem, "cuda:first", 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "cuda:first");
  CHECK_REFUSED(kvonce_plan_create(&problem, "cuda", 2, NULL, &plan), KVONCE_INVALID_ARGUMENT, "num_threads");
  CHECK_REFUSED(kvonce_plan_create(&problem, "cuda:100000", 0, NULL, &plan), KVONCE_UNAVAILABLE, "");

  problem.num_q_heads = 7;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "num_q_heads");
  problem = make_problem(4);
  problem.q_dtype = 3;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "q_dtype");
  problem = make_problem(4);
  problem.k_format = -1;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "k_format");
  problem = make_problem(4);
  problem.mask = 4;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "mask");
  problem = make_problem(4);
  problem.causal = 2;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "causal");
  problem = make_problem(4);
  problem.mask_dtype = KVONCE_DTYPE_F16; /* without an additive mask */
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "mask_dtype");
  problem.mask_dtype = 3;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "mask_dtype");
  problem = make_problem(4);
  problem.scales_dtype = KVONCE_DTYPE_F16; /* without an MLX format */
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "scales_dtype");

  problem = make_problem(4);
  CHECK_OK(kvonce_options_init(&options, sizeof options));
  options.policy = "no_such_key=1";
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, &options, &plan), KVONCE_INVALID_ARGUMENT, "no_such_key");
  CHECK(plan == NULL);
}

/* V is 2 * code - 1; a scale and a bias take turns in one array. */
static void test_affine(void) {
  static unsigned char codes[sizeof v / sizeof v[0]];
  static float sides[2 * sizeof v / sizeof v[0] / kHeadDim];
  kvonce_problem problem = make_problem(1);
  kvonce_inputs inputs = make_inputs(1);
  kvonce_outputs outputs = make_outputs(1);
  kvonce_plan* plan = NULL;
  size_t workspace_bytes = 0;
  void* workspace;
  int i;
  for (i = 0; i < (int)sizeof codes; ++i) codes[i] = (unsigned char)v[i];
  for (i = 0; i < (int)(sizeof sides / sizeof sides[0]); ++i) sides[i] = i % 2 == 0 ? 2.0F : -1.0F;
  problem.v_format = KVONCE_KV_MLX_INT8;
  problem.quant_group = 64;
  CHECK_OK(kvonce_plan_create(&problem, NULL, 0, NULL, &plan));
  CHECK_OK(kvonce_plan_workspace_bytes(plan, &workspace_bytes));
  workspace = allocate(workspace_bytes);
  inputs.v.data = codes;
  inputs.v_scales = sides;
  CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                "v_biases");
  inputs.v_biases = sides + 1;
  inputs.v_scales_token_stride = inputs.v_biases_token_stride = 2;
  inputs.v_scales_head_stride = inputs.v_biases_head_stride = (int64_t)2 * kKvLen;
  inputs.v_scales_seq_stride = inputs.v_biases_seq_stride = (int64_t)2 * kKvLen * kKvHeads;
  CHECK_OK(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL));
  for (i = 0; i < kSeqs * kKvHeads * kQLen * kHeadDim; ++i) {
    CHECK(fabsf(out[i] - (2.0F * value_of(0, i / kHeadDim / kQLen) - 1.0F)) < 1e-5F); /* value_of counts streams */
  }
  free(workspace);
  kvonce_plan_destroy(plan);
}

static void test_plan_queries(void) {
  const kvonce_problem problem = make_problem(4);
  kvonce_plan* plan = NULL;
  const char* kernel_id = NULL;
  size_t required_bytes = 0;
  int64_t max_chunks = 0;
  int64_t max_kv_bytes = 0;
  size_t workspace_bytes = 7;
  char* text;
  CHECK_OK(kvonce_plan_create(&problem, "portable", 1, NULL, &plan));
  CHECK(plan != NULL);
  if (plan == NULL) return;
  CHECK_OK(kvonce_plan_kernel_id(plan, &kernel_id));
  CHECK(kernel_id != NULL && strncmp(kernel_id, "attend_portable_f32_d64x64_r", 28) == 0);
  CHECK_OK(kvonce_plan_max_chunks(plan, &max_chunks));
  CHECK(max_chunks >= 1);
  CHECK_OK(kvonce_plan_max_kv_bytes(plan, &max_kv_bytes));
  CHECK(max_kv_bytes == 2 * (int64_t)sizeof k);
  CHECK_REFUSED(kvonce_plan_workspace_bytes(NULL, &workspace_bytes), KVONCE_INVALID_ARGUMENT, "plan");
  CHECK(workspace_bytes == 7);
  CHECK_REFUSED(kvonce_plan_workspace_bytes(plan, NULL), KVONCE_INVALID_ARGUMENT, "workspace_bytes");

  CHECK_OK(kvonce_plan_explain(plan, NULL, 0, &required_bytes));
  CHECK(required_bytes > 1);
  text = (char*)allocate(required_bytes);
  memset(text, 'x', required_bytes);
  CHECK_REFUSED(kvonce_plan_explain(plan, text, required_bytes - 1, NULL), KVONCE_INVALID_ARGUMENT, "buffer_bytes");
  CHECK(text[0] == 'x');
  CHECK_REFUSED(kvonce_plan_explain(plan, NULL, 1, NULL), KVONCE_INVALID_ARGUMENT, "buffer");
  CHECK_OK(kvonce_plan_explain(plan, text, required_bytes, NULL));
  CHECK(strlen(text) + 1 == required_bytes);
  CHECK(kernel_id != NULL && strstr(text, kernel_id) != NULL);
  free(text);
  kvonce_plan_destroy(plan);
  kvonce_plan_destroy(NULL);
}

static void test_attend_arguments(void) {
  const kvonce_problem problem = make_problem(2);
  const float slopes[2 * kKvHeads] = {0};
  const int32_t wrong_lens[kSeqs] = {kKvLen, kKvLen + 1};
  kvonce_plan* plan = NULL;
  size_t workspace_bytes = 0;
  kvonce_inputs inputs = make_inputs(2);
  kvonce_outputs outputs = make_outputs(2);
  kvonce_context context;
  void* workspace;
  CHECK_OK(kvonce_plan_create(&problem, NULL, 0, NULL, &plan));
  if (plan == NULL) return;
  CHECK_OK(kvonce_plan_workspace_bytes(plan, &workspace_bytes));
  workspace = allocate(workspace_bytes);
  poison_outputs();

  CHECK_REFUSED(kvonce_attend(NULL, &inputs, &outputs, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                "plan");
  CHECK_REFUSED(kvonce_prepare_workspace(plan, NULL, 0, NULL), KVONCE_INVALID_ARGUMENT, "workspace_bytes");
  CHECK_REFUSED(kvonce_check_workspace(NULL, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT, "plan");
  CHECK_REFUSED(kvonce_attend(plan, NULL, &outputs, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                "inputs");
  CHECK_REFUSED(kvonce_attend(plan, &inputs, NULL, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                "outputs");
  if (workspace_bytes > 0) {
    CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes - 1, NULL), KVONCE_INVALID_ARGUMENT,
                  "workspace");
    CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, NULL, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                  "workspace");
  }
  inputs.q.data = NULL;
  CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT, "q");
  inputs = make_inputs(2);
  inputs.kv_lens = wrong_lens;
  CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                "kv_lens");
  inputs = make_inputs(2);
  CHECK(inputs.kv_len == -1);
  inputs.kv_len = kKvLen + 1;
  CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                "kv_len");
  inputs = make_inputs(2);
  inputs.alibi_slopes = slopes;
  CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                "alibi_slopes");
  inputs = make_inputs(2);
  outputs.out = NULL;
  CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL), KVONCE_INVALID_ARGUMENT,
                "out");
  outputs = make_outputs(2);
  CHECK_OK(kvonce_context_init(&context, sizeof context));
  context.num_threads = -1;
  CHECK_REFUSED(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, &context), KVONCE_INVALID_ARGUMENT,
                "num_threads");
  CHECK(outputs_untouched());

  CHECK_OK(kvonce_context_init(&context, sizeof context));
  CHECK_OK(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, &context));
  check_answers(2);
  inputs.kv_lens = NULL;
  inputs.kv_len = 0;
  CHECK_OK(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, &context));
  CHECK(out[0] == 0.0F);
  free(workspace);
  kvonce_plan_destroy(plan);
}

/* A struct of a later release: the library's fields, then more. */
typedef struct later_problem {
  kvonce_problem known;
  int64_t later_field;
} later_problem;

static void test_struct_versions(void) {
  kvonce_plan* plan = NULL;
  kvonce_problem problem = make_problem(3);
  kvonce_inputs inputs = make_inputs(3);
  kvonce_outputs outputs = make_outputs(3);
  size_t workspace_bytes = 0;
  void* workspace;
  later_problem later;
  memset(&later, 0xff, sizeof later);
  CHECK_OK(kvonce_problem_init(&later.known, sizeof later));
  CHECK(later.known.struct_size == sizeof later && later.known.num_seqs == 1 && later.later_field == 0);
  later.known = make_problem(3);
  later.known.struct_size = sizeof later;
  CHECK_OK(kvonce_plan_create(&later.known, NULL, 0, NULL, &plan));
  kvonce_plan_destroy(plan);
  plan = NULL;
  later.later_field = 1;
  CHECK_REFUSED(kvonce_plan_create(&later.known, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "does not know");

  problem.struct_size = sizeof problem - 1;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "struct_size");
  problem.struct_size = 0;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "struct_size");
  CHECK_REFUSED(kvonce_problem_init(&problem, 8), KVONCE_INVALID_ARGUMENT, "struct_size");
  CHECK_REFUSED(kvonce_problem_init(NULL, sizeof problem), KVONCE_INVALID_ARGUMENT, "problem");

  /* Bytes past a short struct belong to the caller: neither read nor written. */
  memset(&problem, 0xff, sizeof problem);
  CHECK_OK(kvonce_problem_init(&problem, KVONCE_PROBLEM_BASIC_SIZE));
  CHECK(problem.quant_group == -1 && problem.mask_dtype == -1);
  problem.num_seqs = kSeqs;
  problem.q_len = kQLen;
  problem.num_q_heads = (int64_t)3 * kKvHeads;
  problem.num_kv_heads = kKvHeads;
  problem.head_dim_qk = kHeadDim;
  problem.max_kv_len = kKvLen;
  inputs.struct_size = KVONCE_INPUTS_BASIC_SIZE;
  inputs.segments = (const kvonce_segment*)(const void*)q;
  outputs.struct_size = KVONCE_OUTPUTS_BASIC_SIZE;
  CHECK_OK(kvonce_plan_create(&problem, NULL, 0, NULL, &plan));
  if (plan == NULL) return;
  CHECK_OK(kvonce_plan_workspace_bytes(plan, &workspace_bytes));
  workspace = allocate(workspace_bytes);
  poison_outputs();
  CHECK_OK(kvonce_attend(plan, &inputs, &outputs, workspace, workspace_bytes, NULL));
  CHECK(out[0] == value_of(0, 0));
  CHECK(lse[0] == kPoison);
  free(workspace);
  kvonce_plan_destroy(plan);
}

static void test_merge(void) {
  const float o[2][2] = {{1.0F, 2.0F}, {3.0F, 6.0F}};
  const float part_lse[2] = {0.0F, 0.0F};
  float merged[2] = {-1.0F, -1.0F};
  float merged_lse = -1.0F;
  kvonce_merge_inputs inputs;
  CHECK_OK(kvonce_merge_inputs_init(&inputs, sizeof inputs));
  CHECK(inputs.lse_row_stride == 1);
  inputs.o = &o[0][0];
  inputs.lse = part_lse;
  inputs.num_parts = 2;
  inputs.num_rows = 1;
  inputs.head_dim_v = 2;
  inputs.o_part_stride = 2;
  inputs.o_row_stride = 2;
  inputs.lse_part_stride = 1;
  CHECK_OK(kvonce_merge(&inputs, merged, 2, &merged_lse));
  CHECK(merged[0] == 2.0F && merged[1] == 4.0F);
  CHECK(fabsf(merged_lse - 0.69314718F) <= 1e-6F);
  merged[0] = -1.0F;
  inputs.num_parts = 0;
  CHECK_REFUSED(kvonce_merge(&inputs, merged, 2, &merged_lse), KVONCE_INVALID_ARGUMENT, "num_parts");
  CHECK_REFUSED(kvonce_merge(NULL, merged, 2, &merged_lse), KVONCE_INVALID_ARGUMENT, "inputs");
  CHECK(merged[0] == -1.0F);
}

static void test_devices(void) {
  size_t num_devices = 0;
  size_t i;
  int num_usable_cpus = 0;
  kvonce_device device;
  CHECK_OK(kvonce_devices(&num_devices));
  CHECK(num_devices >= 1);
  CHECK_REFUSED(kvonce_devices(NULL), KVONCE_INVALID_ARGUMENT, "num_devices");
  CHECK_OK(kvonce_device_init(&device, sizeof device));
  for (i = 0; i < num_devices; ++i) {
    CHECK_OK(kvonce_device_query(i, &device));
    if (device.backend != KVONCE_BACKEND_CPU) continue;
    CHECK(device.target[0] != '\0');
    CHECK(device.unavailable[0] != '\0' || device.num_threads >= 1);
    num_usable_cpus += device.unavailable[0] == '\0';
  }
  CHECK(num_usable_cpus >= 1); /* "portable" runs everywhere */
  device.num_threads = 77;
  CHECK_REFUSED(kvonce_device_query(num_devices, &device), KVONCE_INVALID_ARGUMENT, "device_idx");
  CHECK(device.num_threads == 77);
}

static void test_errors(void) {
  int major = -1, minor = -1, patch = -1;
  kvonce_problem problem = make_problem(1);
  kvonce_plan* plan = NULL;
  CHECK(sscanf(kvonce_version(), "%d.%d.%d", &major, &minor, &patch) == 3);
  CHECK(strcmp(kvonce_last_error(), "") == 0);
  problem.head_dim_qk = 0;
  CHECK_REFUSED(kvonce_plan_create(&problem, NULL, 0, NULL, &plan), KVONCE_INVALID_ARGUMENT, "head_dim_qk");
  CHECK_OK(kvonce_problem_init(&problem, sizeof problem)); /* success leaves the message */
  CHECK(strstr(kvonce_last_error(), "head_dim_qk") != NULL);
}

static const struct {
  const char* name;
  void (*run)(void);
} cases[] = {{"groups", test_groups},
             {"plan_arguments", test_plan_arguments},
             {"affine", test_affine},
             {"plan_queries", test_plan_queries},
             {"attend_arguments", test_attend_arguments},
             {"struct_versions", test_struct_versions},
             {"merge", test_merge},
             {"devices", test_devices},
             {"errors", test_errors}};

int main(int argc, char** argv) {
  size_t i;
  if (argc == 2) {
    fill_tensors();
    for (i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
      if (strcmp(argv[1], cases[i].name) != 0) continue;
      cases[i].run();
      return num_failures == 0 ? 0 : 1;
    }
  }
  fprintf(stderr, "usage: c_abi_test CASE\n");
  return 2;
}
