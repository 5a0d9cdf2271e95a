// What: one decode step through ggml's FLASH_ATTN_EXT operator, as a C function that peers.py calls. Compiled once per
// ggml (llama.cpp's, ik_llama.cpp's) against that ggml's own headers; the two differ in a few names only.
//
// Shapes: q [num_q_heads, head_dim] f32, K and V [num_kv_heads, kv_len, head_dim] of `type`, out [num_q_heads, head_dim]
// f32, all packed. All of the cache is visible: llama.cpp's operator runs without a mask, ik_llama.cpp's shared kernels
// answer only with one (without it the call falls back to the per-head loop), so that it gets a mask of zeros.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ggml.h>
#if __has_include(<ggml-cpu.h>)
#include <ggml-cpu.h>
#define KVONCE_GGML_PLAN(graph, num_threads) ggml_graph_plan(graph, num_threads, nullptr)
#else
#define KVONCE_GGML_PLAN(graph, num_threads) ggml_graph_plan(graph, num_threads)
#define KVONCE_GGML_NEEDS_MASK
#endif

namespace {

// The graph of one problem. Its tensors own no memory: every run points them at the caller's.
struct Step {
  ggml_context* context = nullptr;
  ggml_cgraph* graph = nullptr;
  ggml_tensor* q = nullptr;
  ggml_tensor* k = nullptr;
  ggml_tensor* v = nullptr;
  ggml_tensor* out = nullptr;
  ggml_cplan plan{};
  std::vector<ggml_fp16_t> zeros;  // the mask, [GGML_KQ_MASK_PAD, kv_len]; empty when there is none
  std::vector<std::uint8_t> work;
};

ggml_type type_of(int dtype) {
  if (dtype == 0) return GGML_TYPE_F32;
  return dtype == 1 ? GGML_TYPE_F16 : GGML_TYPE_BF16;
}

}  // namespace

#define KVONCE_PEER extern "C" __attribute__((visibility("default")))

// dtype: 0 f32, 1 f16, 2 bf16, as in kvonce.h. Null when ggml has no memory.
KVONCE_PEER void* kvonce_ggml_create(int dtype, std::int64_t num_q_heads, std::int64_t num_kv_heads,
                                     std::int64_t head_dim, std::int64_t kv_len, int num_threads) {
#if __has_include(<ggml-cpu.h>)
  ggml_cpu_init();
#endif
  auto* const step = new Step;
  ggml_init_params params{};
  params.mem_size = 16 * ggml_tensor_overhead() + 2 * ggml_graph_overhead();
  params.no_alloc = true;
  step->context = ggml_init(params);
  if (step->context == nullptr) {
    delete step;
    return nullptr;
  }
  step->q = ggml_new_tensor_3d(step->context, GGML_TYPE_F32, head_dim, 1, num_q_heads);
  step->k = ggml_new_tensor_3d(step->context, type_of(dtype), head_dim, kv_len, num_kv_heads);
  step->v = ggml_new_tensor_3d(step->context, type_of(dtype), head_dim, kv_len, num_kv_heads);
  const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
  ggml_tensor* mask = nullptr;
#ifdef KVONCE_GGML_NEEDS_MASK
  mask = ggml_new_tensor_2d(step->context, GGML_TYPE_F16, kv_len, GGML_KQ_MASK_PAD);
  step->zeros.resize(static_cast<std::size_t>(kv_len * GGML_KQ_MASK_PAD));
  mask->data = step->zeros.data();
#endif
  step->out = ggml_flash_attn_ext(step->context, step->q, step->k, step->v, mask, scale, 0.0F, 0.0F);
  step->graph = ggml_new_graph(step->context);
  ggml_build_forward_expand(step->graph, step->out);
  step->plan = KVONCE_GGML_PLAN(step->graph, num_threads);
  step->work.resize(step->plan.work_size + 64);
  step->plan.work_data = step->work.data();
  return step;
}

// 0 when ggml reports success.
KVONCE_PEER int kvonce_ggml_run(void* handle, void* q, void* k, void* v, void* out) {
  auto* const step = static_cast<Step*>(handle);
  step->q->data = q;
  step->k->data = k;
  step->v->data = v;
  step->out->data = out;
  return static_cast<int>(ggml_graph_compute(step->graph, &step->plan));
}

KVONCE_PEER void kvonce_ggml_destroy(void* handle) {
  auto* const step = static_cast<Step*>(handle);
  ggml_free(step->context);
  delete step;
}
