#include <algorithm>
#include <cmath>

#include "baselines/baselines.hpp"
#include "shared/partial.h"
#include "shared/token_range.h"

namespace kvonce::bench {
namespace {

// A step of K this long leaves room in L1 for the step of V and for what is being prefetched.
constexpr std::int64_t kStepBytes = 16384;
// Tasks per thread below which a row's tokens are split: enough for the last task not to be waited for.
constexpr std::int64_t kTasksPerThread = 8;

std::int64_t element_bytes(const Problem& problem) { return format_bytes(problem.k_format, 1); }

std::int64_t choose_step_tokens(const Problem& problem) {
  const std::int64_t row_bytes = problem.head_dim_qk * element_bytes(problem);
  std::int64_t tokens = kMaxStepTokens;
  while (tokens > 16 && tokens * row_bytes > kStepBytes) tokens /= 2;
  return tokens;
}

void refuse_unsupported(const Problem& problem) {
  const bool plain = problem.k_format == problem.v_format && problem.k_format <= KvFormat::bf16 &&
                     problem.layout == KvLayout::strided && problem.window == 0 && problem.mask == MaskKind::none &&
                     problem.softcap == 0.0F && !problem.has_sinks && !problem.has_alibi && !problem.has_segments &&
                     problem.head_dim_qk <= kMaxHeadDim && problem.dim_v() <= kMaxHeadDim;
  if (!plain) {
    throw Error(
        ErrorCode::Unsupported,
        "arm per_head: serves strided caches with K and V both f32, f16 or bf16, without window, mask, softcap, "
        "sinks, ALiBi and segments; leave it out with --arms kvonce,read");
  }
}

}  // namespace

PerHead::PerHead(const TargetKernels& kernels, const Problem& problem, Team team, std::int64_t prefetch_level)
    : kernels_(kernels), problem_(problem), team_(team), prefetch_level_(prefetch_level) {
  refuse_unsupported(problem);
  const float scale = problem.scale.value_or(1.0F / std::sqrt(static_cast<float>(problem.head_dim_qk)));
  scale_log2_ = scale * shared::kLog2e;
  num_rows_ = problem.num_seqs * problem.num_q_heads * problem.q_len;
  step_tokens_ = choose_step_tokens(problem);
  const std::int64_t num_steps = std::max<std::int64_t>(1, shared::ceil_div(problem.max_kv_len, step_tokens_));
  const std::int64_t wanted =
      num_rows_ > 0 ? shared::ceil_div(kTasksPerThread * team.num_threads, num_rows_) : std::int64_t{1};
  num_blocks_ = std::min(num_steps, wanted);
  partial_o_.resize(static_cast<std::size_t>(num_rows_ * num_blocks_ * problem.dim_v()));
  partial_lse_.resize(static_cast<std::size_t>(num_rows_ * num_blocks_));
}

std::string PerHead::kernel_id() const {
  return "per_head_" + std::string(kernels_.target) + "_" + std::string(to_string(problem_.k_format)) + "_d" +
         std::to_string(problem_.head_dim_qk) + "x" + std::to_string(problem_.dim_v());
}

void PerHead::run_block(const Inputs& inputs, std::int64_t row, std::int64_t block, float* o, float* lse) const {
  const std::int64_t query_idx = row % problem_.q_len;
  const std::int64_t head = row / problem_.q_len % problem_.num_q_heads;
  const std::int64_t seq = row / problem_.q_len / problem_.num_q_heads;
  const std::int64_t kv_head = head / problem_.group_size();
  const auto at = [](const TensorView& view, std::int64_t elements, std::int64_t bytes) {
    return static_cast<const char*>(view.data) + elements * bytes;
  };
  const std::int64_t kv_bytes = element_bytes(problem_);
  PerHeadTask task;
  task.q = at(inputs.q, seq * inputs.q.seq_stride + head * inputs.q.head_stride + query_idx * inputs.q.token_stride,
              problem_.q_dtype == DType::f32 ? 4 : 2);
  task.q_dtype = problem_.q_dtype;
  task.scale_log2 = scale_log2_;
  task.k = at(inputs.k, seq * inputs.k.seq_stride + kv_head * inputs.k.head_stride, kv_bytes);
  task.v = at(inputs.v, seq * inputs.v.seq_stride + kv_head * inputs.v.head_stride, kv_bytes);
  task.k_token_stride = inputs.k.token_stride;
  task.v_token_stride = inputs.v.token_stride;
  task.head_dim_qk = problem_.head_dim_qk;
  task.head_dim_v = problem_.dim_v();
  task.token_end = shared::visible_range(query_idx, problem_.q_len, problem_.max_kv_len, 0, problem_.causal, 0).end;
  task.step_tokens = step_tokens_;
  task.first_step = block;
  task.step_stride = num_blocks_;
  task.prefetch_level = prefetch_level_;
  task.o = o;
  task.lse = lse;
  kernels_.per_head[static_cast<std::size_t>(problem_.k_format)](task);
}

void PerHead::run(const Inputs& inputs, float* out) {
  const std::int64_t dim_v = problem_.dim_v();
  team_.run(num_rows_ * num_blocks_, [&](std::int64_t task) {
    float* const o = num_blocks_ == 1 ? out + task * dim_v : partial_o_.data() + task * dim_v;
    run_block(inputs, task / num_blocks_, task % num_blocks_, o, partial_lse_.data() + task);
  });
  if (num_blocks_ == 1) return;
  team_.run(num_rows_, [&](std::int64_t row) {
    kernels_.merge({partial_o_.data() + row * num_blocks_ * dim_v, partial_lse_.data() + row * num_blocks_, num_blocks_,
                    dim_v, out + row * dim_v});
  });
}

}  // namespace kvonce::bench
