/* The C ABI of kvonce (C99). The names, units and rules are those of the C++ headers, which hold the full comments.
 *
 * Every function returns a kvonce_status; what it computes is written through its last pointers, only on KVONCE_OK.
 * No C++ exception leaves the library. Structs begin with struct_size, the size the caller was compiled with: fill them
 * with their init function, then set fields. A struct may be shorter than the library's (the *_BASIC_SIZE prefix, or
 * the size of an earlier release: the fields that are missing take their defaults) or longer (bytes that this library
 * does not know must be zero). Flags are 0 or 1.
 */
#ifndef KVONCE_KVONCE_H_
#define KVONCE_KVONCE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KVONCE_API __attribute__((visibility("default")))
#else
#define KVONCE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t kvonce_status; /* KVONCE_OK or the value of kvonce::ErrorCode */
enum {
  KVONCE_OK = 0,
  KVONCE_INVALID_ARGUMENT = 1, /* can never be right; the message names it, what was given and what is allowed */
  KVONCE_UNSUPPORTED = 2,      /* right, but not served by this backend; the message says what to use instead */
  KVONCE_UNAVAILABLE = 3,      /* the backend or target is not built in or not on this machine */
  KVONCE_INTERNAL = 4          /* a fault of the library, or out of memory */
};

typedef int32_t kvonce_dtype;
enum { KVONCE_DTYPE_F32 = 0, KVONCE_DTYPE_F16 = 1, KVONCE_DTYPE_BF16 = 2 };

typedef int32_t kvonce_kv_format;
enum {
  KVONCE_KV_F32 = 0,
  KVONCE_KV_F16 = 1,
  KVONCE_KV_BF16 = 2,
  KVONCE_KV_F8_E4M3 = 3,
  KVONCE_KV_MLX_INT8 = 4,
  KVONCE_KV_MLX_INT4 = 5,
  KVONCE_KV_Q8_0 = 6,
  KVONCE_KV_Q4_0 = 7
};

typedef int32_t kvonce_mask_kind;
enum { KVONCE_MASK_NONE = 0, KVONCE_MASK_BOOLEAN = 1, KVONCE_MASK_ADDITIVE = 2, KVONCE_MASK_TREE = 3 };

typedef int32_t kvonce_kv_layout;
enum { KVONCE_LAYOUT_STRIDED = 0, KVONCE_LAYOUT_PAGED_NHD = 1, KVONCE_LAYOUT_PAGED_HND = 2 };

typedef int32_t kvonce_backend;
enum { KVONCE_BACKEND_CPU = 0, KVONCE_BACKEND_CUDA = 1, KVONCE_BACKEND_METAL = 2 };

/* kvonce::Problem: what is asked, without pointers and without lengths. */
typedef struct kvonce_problem {
  size_t struct_size;
  int64_t num_seqs;     /* >= 0; default 1 */
  int64_t q_len;        /* query tokens per sequence, 0..64; default 1 */
  int64_t num_q_heads;  /* >= 1, a multiple of num_kv_heads */
  int64_t num_kv_heads; /* >= 1 */
  int64_t head_dim_qk;  /* 1..1024 */
  int64_t head_dim_v;   /* 1..1024; 0 means head_dim_qk */
  int64_t max_kv_len;   /* tokens, 0..2^31-1 */
  kvonce_dtype q_dtype;
  kvonce_dtype out_dtype;
  kvonce_kv_format k_format;
  kvonce_kv_format v_format;
  int32_t causal;    /* a row sees keys up to its own position (bottom-right aligned); default 1 */
  int32_t has_scale; /* 0: scale is head_dim_qk^-0.5; default 0 */
  float scale;       /* with has_scale */
  float softcap;     /* > 0: score becomes softcap * tanh(score / softcap) */
  int64_t window;    /* newest keys a row sees, itself included; 0: all */
  /* the end of KVONCE_PROBLEM_BASIC_SIZE; every field below defaults to 0 */
  int64_t quant_group; /* values per scale of the MLX formats: 32, 64 or 128 */
  int64_t page_size;   /* tokens per page of the paged layouts, >= 1 */
  kvonce_kv_layout layout;
  kvonce_mask_kind mask;
  int32_t v_is_k_prefix;     /* V is K's first head_dim_v dims, in the same memory */
  int32_t has_sinks;         /* kvonce_inputs.sinks: one extra logit per query head */
  int32_t has_alibi;         /* kvonce_inputs.alibi_slopes */
  int32_t has_mask_slopes;   /* kvonce_inputs.mask_slopes multiply an additive mask */
  int32_t has_segments;      /* kvonce_inputs.segments: which sequences read which token range */
  kvonce_dtype mask_dtype;   /* elements of an additive mask; KVONCE_DTYPE_F32 with any other */
  kvonce_dtype scales_dtype; /* of the MLX formats' scales and biases; KVONCE_DTYPE_F32 with any other */
  int32_t reserved;          /* must be 0 */
} kvonce_problem;
#define KVONCE_PROBLEM_BASIC_SIZE offsetof(kvonce_problem, quant_group)

/* kvonce::PlanOptions. */
typedef struct kvonce_options {
  size_t struct_size;
  int64_t chunk_tokens; /* tokens per chunk: fixes the split of a row whatever the batch; 0: chosen */
  /* the end of KVONCE_OPTIONS_BASIC_SIZE */
  const char* policy;       /* "row_tile=4,chunk_tokens=2048"; NULL: by KVONCE_POLICY's file, or chosen */
  int32_t earlier_kv_ready; /* CUDA: K/V before kv_len - q_len were complete before the preceding kernel started */
  int32_t reserved;         /* must be 0 */
} kvonce_options;
#define KVONCE_OPTIONS_BASIC_SIZE offsetof(kvonce_options, policy)

/* Element [seq][head][token][dim] is at data + seq * seq_stride + head * head_stride + token * token_stride + dim.
 * Strides are in elements (in blocks for block formats); the last dim is contiguous. Never grows. */
typedef struct kvonce_tensor {
  const void* data; /* owned by the caller; may be NULL only when the tensor has no elements */
  int64_t seq_stride;
  int64_t head_stride;
  int64_t token_stride;
} kvonce_tensor;

/* Sequences [seq_begin, seq_end) read tokens [token_begin, token_end) of K/V sequence kv_seq. Never grows. */
typedef struct kvonce_segment {
  int64_t seq_begin;
  int64_t seq_end;
  int64_t kv_seq;
  int64_t token_begin;
  int64_t token_end;
} kvonce_segment;

/* kvonce::Inputs: what kvonce_attend reads. What the problem does not announce must be NULL. */
typedef struct kvonce_inputs {
  size_t struct_size;
  kvonce_tensor q;          /* [num_seqs, num_q_heads, q_len, head_dim_qk] of q_dtype */
  kvonce_tensor k;          /* [num_seqs, num_kv_heads, kv_len, head_dim_qk] of k_format; paged: [num_pages, ...] */
  kvonce_tensor v;          /* [num_seqs, num_kv_heads, kv_len, head_dim_v] of v_format */
  const int32_t* kv_lens;   /* [num_seqs] valid tokens, 0..kv_len; NULL: kv_len everywhere */
  const int32_t* kv_starts; /* [num_seqs] first visible token (left padding), 0..kv_len; NULL: 0 */
  /* the end of KVONCE_INPUTS_BASIC_SIZE; every field below defaults to 0 except mask_token_stride, 1, and kv_len, -1 */
  const void* mask;
  int64_t mask_seq_stride; /* in elements; 0 broadcasts */
  int64_t mask_head_stride;
  int64_t mask_row_stride;
  int64_t mask_token_stride;
  const float* sinks;         /* [num_q_heads] */
  const float* alibi_slopes;  /* [num_q_heads] */
  const float* mask_slopes;   /* [num_q_heads] */
  const int32_t* block_table; /* [num_seqs, >= ceil(kv_len / page_size)] page ids */
  int64_t block_table_stride; /* page ids between two sequences */
  int64_t num_pages;          /* pages in k and v */
  /* MLX: [num_seqs, num_kv_heads, kv_len, head_dim_qk / quant_group] of scales_dtype, see the end; f8_e4m3: float
     [num_kv_heads] */
  const void* k_scales;
  const void* v_scales; /* the same of v, head_dim_v */
  const void* k_biases; /* MLX: as k_scales */
  const void* v_biases;
  const kvonce_segment* segments; /* [num_segments] */
  int64_t num_segments;
  int64_t kv_len; /* tokens in k and v: every sequence's length, or with kv_lens the most; -1: max_kv_len */
  /* Of the MLX formats' scales and biases, in elements: those of one token lie side by side. */
  int64_t k_scales_seq_stride;
  int64_t k_scales_head_stride;
  int64_t k_scales_token_stride;
  int64_t v_scales_seq_stride;
  int64_t v_scales_head_stride;
  int64_t v_scales_token_stride;
  int64_t k_biases_seq_stride;
  int64_t k_biases_head_stride;
  int64_t k_biases_token_stride;
  int64_t v_biases_seq_stride;
  int64_t v_biases_head_stride;
  int64_t v_biases_token_stride;
} kvonce_inputs;
#define KVONCE_INPUTS_BASIC_SIZE offsetof(kvonce_inputs, mask)

/* kvonce::Outputs: what kvonce_attend writes. Must not overlap the inputs. */
typedef struct kvonce_outputs {
  size_t struct_size;
  void* out;              /* [num_seqs, num_q_heads, q_len, head_dim_v] of out_dtype, last dim contiguous */
  int64_t out_seq_stride; /* in elements */
  int64_t out_head_stride;
  int64_t out_token_stride;
  /* the end of KVONCE_OUTPUTS_BASIC_SIZE */
  float* lse; /* [num_seqs, num_q_heads, q_len] natural log; NULL: not wanted */
  int64_t lse_seq_stride;
  int64_t lse_head_stride;
  int64_t lse_token_stride;
} kvonce_outputs;
#define KVONCE_OUTPUTS_BASIC_SIZE offsetof(kvonce_outputs, lse)

/* Calls body(body_context, i) for every i in [0, count), concurrently if it can, and returns when all have returned. */
typedef void (*kvonce_parallel_for)(void* host, int64_t count, void (*body)(void* body_context, int64_t i),
                                    void* body_context);

/* kvonce::Context: what the caller's runtime lends to one call. */
typedef struct kvonce_context {
  size_t struct_size;
  kvonce_parallel_for parallel_for; /* the host's own team; NULL: kvonce's pool */
  void* parallel_for_host;          /* passed through as `host` */
  int32_t num_threads;              /* at most this many at once; 0: the plan's number */
  int32_t reserved;                 /* must be 0 */
  /* the end of KVONCE_CONTEXT_BASIC_SIZE */
  void* cuda_stream; /* cudaStream_t of the CUDA backend */
} kvonce_context;
#define KVONCE_CONTEXT_BASIC_SIZE offsetof(kvonce_context, cuda_stream)

/* kvonce::MergeInputs: partials of the same rows over disjoint token ranges, all float32. */
typedef struct kvonce_merge_inputs {
  size_t struct_size;
  const float* o;        /* [num_parts, num_rows, head_dim_v], last dim contiguous */
  const float* lse;      /* [num_parts, num_rows] natural log */
  int64_t num_parts;     /* >= 1 */
  int64_t num_rows;      /* >= 0 */
  int64_t head_dim_v;    /* >= 1 */
  int64_t o_part_stride; /* in elements */
  int64_t o_row_stride;
  int64_t lse_part_stride;
  int64_t lse_row_stride; /* default 1 */
} kvonce_merge_inputs;

/* kvonce::Device, as told by kvonce_device_query. Texts end in NUL and are cut to fit. */
typedef struct kvonce_device {
  size_t struct_size;
  kvonce_backend backend;
  int32_t num_threads; /* threads a plan may use */
  int64_t l1_bytes;    /* data caches; 0 when unknown */
  int64_t l2_bytes;
  int64_t l3_bytes;
  double read_gbps;      /* streaming read bandwidth; 0 when unknown */
  char target[32];       /* CPU: "portable", "avx2", "avx512", "avx512_bf16", "neon", "neon_bf16" */
  char name[128];        /* the processor's own name */
  char unavailable[512]; /* empty when usable, else one sentence saying why not */
} kvonce_device;

/* What will run: immutable, may be used by several threads at once with different workspaces. */
typedef struct kvonce_plan kvonce_plan;

/* "major.minor.patch" of the library that is loaded; never NULL. */
KVONCE_API const char* kvonce_version(void);

/* The message of the latest call on this thread that did not return KVONCE_OK; "" before the first. Valid until the
 * next such call on this thread. */
KVONCE_API const char* kvonce_last_error(void);

/* Fill a struct with its defaults. struct_size: sizeof of the caller's struct, or its *_BASIC_SIZE. */
KVONCE_API kvonce_status kvonce_problem_init(kvonce_problem* problem, size_t struct_size);
KVONCE_API kvonce_status kvonce_options_init(kvonce_options* options, size_t struct_size);
KVONCE_API kvonce_status kvonce_inputs_init(kvonce_inputs* inputs, size_t struct_size);
KVONCE_API kvonce_status kvonce_outputs_init(kvonce_outputs* outputs, size_t struct_size);
KVONCE_API kvonce_status kvonce_context_init(kvonce_context* context, size_t struct_size);
KVONCE_API kvonce_status kvonce_merge_inputs_init(kvonce_merge_inputs* inputs, size_t struct_size);
KVONCE_API kvonce_status kvonce_device_init(kvonce_device* device, size_t struct_size);

/* Every backend and target this library knows, best CPU target first; what cannot run here says why. */
KVONCE_API kvonce_status kvonce_devices(size_t* num_devices);
KVONCE_API kvonce_status kvonce_device_query(size_t device_idx, kvonce_device* device);

/* kvonce::make_plan. target: a CPU target's name, "cuda" or "cuda:N", or NULL for the default device. num_threads: 0 chooses.
 * options: NULL for defaults. The plan is released with kvonce_plan_destroy. */
KVONCE_API kvonce_status kvonce_plan_create(const kvonce_problem* problem, const char* target, int32_t num_threads,
                                            const kvonce_options* options, kvonce_plan** plan);
KVONCE_API void kvonce_plan_destroy(kvonce_plan* plan); /* NULL is allowed */

KVONCE_API kvonce_status kvonce_plan_workspace_bytes(const kvonce_plan* plan, size_t* workspace_bytes);
KVONCE_API kvonce_status kvonce_plan_read_factor(const kvonce_plan* plan, int64_t* read_factor);
KVONCE_API kvonce_status kvonce_plan_max_chunks(const kvonce_plan* plan, int64_t* max_chunks);
KVONCE_API kvonce_status kvonce_plan_max_kv_bytes(const kvonce_plan* plan, int64_t* max_kv_bytes);
KVONCE_API kvonce_status kvonce_plan_kernel_id(const kvonce_plan* plan, const char** kernel_id); /* owned by the plan */

/* Several lines of text. required_bytes (may be NULL) is set whenever the plan is valid and counts the ending NUL.
 * buffer NULL with buffer_bytes 0 only asks for it; a buffer that is too small is left as it was and refused. */
KVONCE_API kvonce_status kvonce_plan_explain(const kvonce_plan* plan, char* buffer, size_t buffer_bytes,
                                             size_t* required_bytes);

/* kvonce::attend. workspace: at least workspace_bytes of the plan, at any alignment, used by one call at a time; NULL
 * when the plan needs none. context: NULL for defaults. When an argument is refused nothing has been written. */
KVONCE_API kvonce_status kvonce_attend(const kvonce_plan* plan, const kvonce_inputs* inputs,
                                       const kvonce_outputs* outputs, void* workspace, size_t workspace_bytes,
                                       const kvonce_context* context);

/* CUDA: kvonce::prepare_workspace, once before the first kvonce_attend with a workspace, and kvonce::check_workspace, which
 * waits for the context's stream. Other backends only check the arguments. */
KVONCE_API kvonce_status kvonce_prepare_workspace(const kvonce_plan* plan, void* workspace, size_t workspace_bytes,
                                                  const kvonce_context* context);
KVONCE_API kvonce_status kvonce_check_workspace(const kvonce_plan* plan, void* workspace, size_t workspace_bytes,
                                                const kvonce_context* context);

/* kvonce::merge: out [num_rows, head_dim_v] and lse [num_rows], either of which may be one of the parts. */
KVONCE_API kvonce_status kvonce_merge(const kvonce_merge_inputs* inputs, float* out, int64_t out_row_stride,
                                      float* lse);

#ifdef __cplusplus
}
#endif

#endif /* KVONCE_KVONCE_H_ */
