// Runs a plan: cuts the call into work items, hands them to the workers, merges each KV stream when its last chunk ends.
//
//   item = (sequence, KV head, row block, token chunk), numbered in that order; workers draw runs of numbers.
//   The worker that finishes the last chunk of a (sequence, KV head, row block) merges it, always in chunk order.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/plan_data.hpp"
#include "core/validate.hpp"
#include "cpu/backend.hpp"
#include "cpu/pool.hpp"
#include "cpu/task.hpp"
#include "shared/partial.h"

namespace kvonce::cpu {
namespace {

/// Bytes of so many elements of K or V, blocks of block formats.
std::int64_t stride_bytes(KvFormat format, std::int64_t stride) {
  return format == KvFormat::mlx_int4 ? stride / 2 : stride * format_bytes(format, 1);
}
std::int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

const char* at(const void* base, std::int64_t elements, std::int64_t bytes) {
  return static_cast<const char*>(base) + elements * bytes;
}

class Call {
 public:
  Call(const core::PlanData& data, const Inputs& in, const Outputs& out, void* workspace)
      : data_(data), p_(data.problem), in_(in), out_(out), target_(*find_target(data.device.target)) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace);
    char* base = static_cast<char*>(workspace) + ((address + 63) / 64 * 64 - address);
    const core::WorkspaceLayout& w = data.workspace;
    item_starts_ = reinterpret_cast<std::int64_t*>(base + w.item_starts);
    counters_ = reinterpret_cast<std::int32_t*>(base + w.counters);
    partial_lse_ = reinterpret_cast<float*>(base + w.partial_lse);
    partial_o_ = reinterpret_cast<float*>(base + w.partial_o);
    scratch_ = base + w.scratch;
    heads_inside_ = in.k.head_stride < in.k.token_stride;
    number_items();
  }

  [[nodiscard]] int num_workers(int limit) const {
    const std::int64_t by_bytes = kv_bytes_ / data_.policy.worker_bytes + 1;
    return static_cast<int>(std::min({static_cast<std::int64_t>(limit), num_items(), by_bytes}));
  }

  /// Draws runs of neighbouring items until none is left. A run's first rows come cold from memory, the later chunks'
  /// rows were prefetched by the chunk before them, so runs are long at first and shrink to balance the end.
  /// Neighbours are chunks of one stream; where tokens stand before heads they are the heads of one chunk, because the
  /// processor's own prefetcher brings the next head's rows along (Ice Lake, 2 threads, f16, 4 KV heads, share of a
  /// plain read at 4 and 8 rows: 0.49 0.37 by stream, 0.57 0.40 by chunk; docs/kernel-cpu.md).
  void work(int slot) {
    std::int64_t begin = next_item_.load(std::memory_order_relaxed);
    while (begin < num_items()) {
      const std::int64_t count = std::max<std::int64_t>(1, (num_items() - begin) / (2 * num_slots));
      if (!next_item_.compare_exchange_weak(begin, begin + count, std::memory_order_relaxed)) continue;
      for (std::int64_t item = begin; item < begin + count; ++item) run_item(item, slot);
      begin = next_item_.load(std::memory_order_relaxed);
    }
  }

  /// Threads that share the work; set before the first of them starts.
  int num_slots = 1;

 private:
  struct Item {
    std::int64_t seq;
    std::int64_t kv_head;
    std::int64_t row_block;
    std::int64_t chunk;
    std::int64_t num_chunks;
  };

  [[nodiscard]] std::int64_t num_items() const { return item_starts_[p_.num_seqs]; }
  [[nodiscard]] std::int64_t kv_len(std::int64_t seq) const {
    return in_.kv_lens != nullptr ? in_.kv_lens[seq] : core::most_tokens(p_, in_);
  }
  [[nodiscard]] std::int64_t kv_start(std::int64_t seq) const {
    return in_.kv_starts != nullptr ? in_.kv_starts[seq] : 0;
  }

  /// Keys that query tokens [first, last] of a sequence see between them.
  [[nodiscard]] shared::TokenRange seen(std::int64_t seq, std::int64_t first, std::int64_t last) const {
    const shared::TokenRange oldest =
        shared::visible_range(first, p_.q_len, kv_len(seq), kv_start(seq), p_.causal, p_.window);
    const shared::TokenRange newest =
        shared::visible_range(last, p_.q_len, kv_len(seq), kv_start(seq), p_.causal, p_.window);
    return {std::min(oldest.begin, newest.begin), std::max(oldest.end, newest.end)};
  }

  /// Chunks lie on a fixed grid over the token positions, so a row's split depends on chunk_tokens alone.
  [[nodiscard]] shared::TokenRange chunks_of(std::int64_t seq) const {
    const shared::TokenRange keys = seen(seq, 0, p_.q_len - 1);
    const std::int64_t first = keys.begin / data_.policy.chunk_tokens;
    const std::int64_t end = shared::ceil_div(keys.end, data_.policy.chunk_tokens);
    return {first, std::max(end, first + 1)};  // a sequence without keys has one empty chunk
  }

  void number_items() {
    const std::int64_t streams = p_.num_kv_heads * data_.row_blocks;
    const std::int64_t token_bytes = core::token_kv_bytes(p_);
    std::int64_t items = 0;
    for (std::int64_t seq = 0; seq < p_.num_seqs; ++seq) {
      const shared::TokenRange keys = seen(seq, 0, p_.q_len - 1);
      const shared::TokenRange chunks = chunks_of(seq);
      item_starts_[seq] = items;
      items += streams * (chunks.end - chunks.begin);
      kv_bytes_ += std::max<std::int64_t>(0, keys.end - keys.begin) * p_.num_kv_heads * token_bytes;
      std::fill_n(counters_ + seq * streams, streams, static_cast<std::int32_t>(chunks.end - chunks.begin));
    }
    item_starts_[p_.num_seqs] = items;
  }

  [[nodiscard]] Item item_at(std::int64_t number) const {
    const std::int64_t* next = std::upper_bound(item_starts_, item_starts_ + p_.num_seqs + 1, number);
    const std::int64_t seq = next - item_starts_ - 1;
    const std::int64_t num_chunks = (item_starts_[seq + 1] - item_starts_[seq]) / (p_.num_kv_heads * data_.row_blocks);
    const std::int64_t within = number - item_starts_[seq];
    const std::int64_t streams = p_.num_kv_heads * data_.row_blocks;
    const std::int64_t stream = heads_inside_ ? within % streams : within / num_chunks;
    const std::int64_t chunk = heads_inside_ ? within / streams : within % num_chunks;
    return {seq, stream / data_.row_blocks, stream % data_.row_blocks, chunk, num_chunks};
  }

  void run_item(std::int64_t number, int slot) {
    const Item item = item_at(number);
    target_.attend_chunk(chunk_task(item, slot));
    const std::int64_t counter = (item.seq * p_.num_kv_heads + item.kv_head) * data_.row_blocks + item.row_block;
    // Releases this chunk's partials; the last one acquires all of them.
    if (std::atomic_ref<std::int32_t>(counters_[counter]).fetch_sub(1, std::memory_order_acq_rel) == 1) {
      target_.merge_rows(merge_task(item));
    }
  }

  [[nodiscard]] std::int64_t row_begin(const Item& item) const {
    return data_.rows_per_stream * item.row_block / data_.row_blocks;
  }
  [[nodiscard]] std::int64_t row_end(const Item& item) const {
    return data_.rows_per_stream * (item.row_block + 1) / data_.row_blocks;
  }
  /// Of the item's stream: partials stand by chunk, then row, so that a chunk writes one piece of memory.
  [[nodiscard]] std::int64_t first_partial(const Item& item) const {
    return (item.seq * p_.num_kv_heads + item.kv_head) * data_.rows_per_stream * data_.max_chunks;
  }

  /// The heads of one chunk run one after the other where they lie side by side: the first fetches the rows of all.
  [[nodiscard]] std::int64_t fetch_bytes(const TensorView& view, KvFormat format, std::int64_t dims,
                                         bool first_head) const {
    const std::int64_t row = format_bytes(format, dims);
    const bool side_by_side =
        stride_bytes(format, view.head_stride) == row && view.token_stride == p_.num_kv_heads * view.head_stride;
    return first_head && side_by_side ? p_.num_kv_heads * row : row;
  }

  [[nodiscard]] static const void* stream_of(const TensorView& view, KvFormat format, const Item& item) {
    return static_cast<const char*>(view.data) +
           stride_bytes(format, item.seq * view.seq_stride + item.kv_head * view.head_stride);
  }
  /// MLX's codes count in bytes from here on.
  [[nodiscard]] static std::int64_t task_stride(KvFormat format, std::int64_t stride) {
    return format == KvFormat::mlx_int4 ? stride / 2 : stride;
  }
  [[nodiscard]] SideRows side_rows(const TensorView& view, const Item& item) const {
    if (view.data == nullptr) return {};
    return {at(view.data, item.seq * view.seq_stride + item.kv_head * view.head_stride, element_bytes(p_.scales_dtype)),
            view.token_stride};
  }

  [[nodiscard]] ChunkTask chunk_task(const Item& item, int slot) const {
    const std::int64_t group = p_.group_size();
    const std::int64_t q_head = item.kv_head * group;
    ChunkTask t{};
    t.q = at(in_.q.data, item.seq * in_.q.seq_stride + q_head * in_.q.head_stride, element_bytes(p_.q_dtype));
    t.q_token_stride = in_.q.token_stride;
    t.q_head_stride = in_.q.head_stride;
    t.q_dtype = p_.q_dtype;
    t.q_len = p_.q_len;
    t.group_size = group;
    t.row_begin = row_begin(item);
    t.num_rows = row_end(item) - t.row_begin;
    t.scale_log2e = *p_.scale * shared::kLog2e;
    t.k = stream_of(in_.k, p_.k_format, item);
    t.v = stream_of(in_.v, p_.v_format, item);
    t.k_token_stride = task_stride(p_.k_format, in_.k.token_stride);
    t.v_token_stride = task_stride(p_.v_format, in_.v.token_stride);
    t.k_format = p_.k_format;
    t.v_format = p_.v_format;
    t.head_dim_qk = p_.head_dim_qk;
    t.head_dim_v = p_.head_dim_v;
    t.quant_group = p_.quant_group;
    t.scales_dtype = p_.scales_dtype;
    t.k_scales = side_rows(in_.k_scales, item);
    t.k_biases = side_rows(in_.k_biases, item);
    t.v_scales = side_rows(in_.v_scales, item);
    t.v_biases = side_rows(in_.v_biases, item);
    t.kv_len = kv_len(item.seq);
    t.kv_start = kv_start(item.seq);
    t.window = p_.window;
    t.causal = p_.causal;
    t.rules = score_rules(item, q_head);
    const shared::TokenRange keys = seen(item.seq, t.row_begin / group, (t.row_begin + t.num_rows - 1) / group);
    const std::int64_t chunk_begin = (chunks_of(item.seq).begin + item.chunk) * data_.policy.chunk_tokens;
    t.chunk = {std::max(keys.begin, chunk_begin), std::min(keys.end, chunk_begin + data_.policy.chunk_tokens)};
    const bool first_head = heads_inside_ && item.kv_head == 0 && item.row_block == 0;
    t.k_fetch_bytes = fetch_bytes(in_.k, p_.k_format, p_.head_dim_qk, first_head);
    t.v_fetch_bytes = fetch_bytes(in_.v, p_.v_format, p_.head_dim_v, first_head);
    t.pair_dot = data_.policy.pair_dot != 0;
    t.row_tile = data_.policy.row_tile;
    t.step_tokens = data_.policy.step_tokens;
    t.prefetch_tokens = data_.policy.prefetch_tokens;
    t.prefetch_lines = data_.policy.prefetch_lines;
    t.prefetch_level = data_.policy.prefetch_level;
    t.scratch = reinterpret_cast<float*>(scratch_ + static_cast<std::size_t>(slot) * data_.workspace.scratch_bytes);
    const std::int64_t first = first_partial(item) + item.chunk * data_.rows_per_stream;
    t.partial_o = partial_o_ + first * round_up(p_.head_dim_v, kPadFloats);
    t.partial_lse = partial_lse_ + first;
    return t;
  }

  [[nodiscard]] ScoreRules score_rules(const Item& item, std::int64_t q_head) const {
    ScoreRules rules{};
    rules.softcap_log2e = p_.softcap * shared::kLog2e;
    if (p_.has_alibi) rules.alibi_slopes = in_.alibi_slopes + q_head;
    if (p_.mask == MaskKind::none || in_.mask == nullptr) return rules;
    const bool tree = p_.mask == MaskKind::tree;
    rules.mask = p_.mask;
    rules.mask_dtype = p_.mask_dtype;
    rules.mask_first_key = tree ? kv_len(item.seq) - p_.q_len : 0;
    rules.mask_head_stride = tree ? 0 : in_.mask_head_stride;
    rules.mask_row_stride = in_.mask_row_stride;
    rules.mask_token_stride = in_.mask_token_stride;
    rules.mask_entries = at(in_.mask, item.seq * in_.mask_seq_stride + q_head * rules.mask_head_stride,
                            p_.mask == MaskKind::additive ? element_bytes(p_.mask_dtype) : 1);
    if (p_.has_mask_slopes) rules.mask_slopes = in_.mask_slopes + q_head;
    return rules;
  }

  [[nodiscard]] MergeTask merge_task(const Item& item) const {
    const std::int64_t q_head = item.kv_head * p_.group_size();
    MergeTask t{};
    t.partial_o = partial_o_ + first_partial(item) * round_up(p_.head_dim_v, kPadFloats);
    t.partial_lse = partial_lse_ + first_partial(item);
    t.num_chunks = item.num_chunks;
    t.rows_per_stream = data_.rows_per_stream;
    t.row_begin = row_begin(item);
    t.num_rows = row_end(item) - t.row_begin;
    t.group_size = p_.group_size();
    t.head_dim_v = p_.head_dim_v;
    t.sinks = in_.sinks != nullptr ? in_.sinks + q_head : nullptr;
    t.out = static_cast<char*>(out_.out) +
            (item.seq * out_.out_seq_stride + q_head * out_.out_head_stride) * element_bytes(p_.out_dtype);
    t.out_token_stride = out_.out_token_stride;
    t.out_head_stride = out_.out_head_stride;
    t.out_dtype = p_.out_dtype;
    t.lse = out_.lse != nullptr ? out_.lse + item.seq * out_.lse_seq_stride + q_head * out_.lse_head_stride : nullptr;
    t.lse_token_stride = out_.lse_token_stride;
    t.lse_head_stride = out_.lse_head_stride;
    return t;
  }

  const core::PlanData& data_;
  const Problem& p_;
  const Inputs& in_;
  const Outputs& out_;
  const Target& target_;
  std::int64_t* item_starts_;
  std::int32_t* counters_;
  float* partial_lse_;
  float* partial_o_;
  char* scratch_;
  bool heads_inside_;          // tokens before heads in memory: a chunk's heads run one after the other
  std::int64_t kv_bytes_ = 0;  // of the keys that any row sees
  std::atomic<std::int64_t> next_item_{0};
};

}  // namespace

void run(const core::PlanData& data, const Inputs& inputs, const Outputs& outputs, void* workspace,
         const Context& context) {
  if (data.problem.num_seqs == 0 || data.problem.q_len == 0) return;
  Call call(data, inputs, outputs, workspace);
  call.num_slots = call.num_workers(context.num_threads > 0 ? context.num_threads : data.device.num_threads);
  if (call.num_slots <= 1) {
    call.work(0);
  } else if (context.parallel_for != nullptr) {
    context.parallel_for(
        context.parallel_for_host, call.num_slots,
        [](void* c, std::int64_t slot) { static_cast<Call*>(c)->work(static_cast<int>(slot)); }, &call);
  } else {
    Pool::shared().run(
        call.num_slots, [](void* c, int slot) { static_cast<Call*>(c)->work(slot); }, &call);
  }
}

}  // namespace kvonce::cpu
