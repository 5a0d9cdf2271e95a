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

constexpr std::int64_t kRunWords = 8;  // a cache line for each worker's run

class Call {
 public:
  Call(const core::PlanData& data, const Inputs& in, const Outputs& out, void* workspace)
      : data_(data), p_(data.problem), in_(in), out_(out), target_(*find_target(data.device.target)) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace);
    char* base = static_cast<char*>(workspace) + ((address + 63) / 64 * 64 - address);
    const core::WorkspaceLayout& w = data.workspace;
    item_starts_ = reinterpret_cast<std::int64_t*>(base + w.item_starts);
    runs_ = reinterpret_cast<std::uint64_t*>(base + w.runs);
    counters_ = reinterpret_cast<std::int32_t*>(base + w.counters);
    partial_lse_ = reinterpret_cast<float*>(base + w.partial_lse);
    partial_o_ = reinterpret_cast<float*>(base + w.partial_o);
    scratch_ = base + w.scratch;
    heads_inside_ = in.k.head_stride < in.k.token_stride;
    heads_per_step_ = side_by_side(in.k, p_.k_format, p_.head_dim_qk) && side_by_side(in.v, p_.v_format, p_.head_dim_v)
                          ? data_.policy.heads_per_step
                          : 1;
    number_items();
  }

  [[nodiscard]] int num_workers(int limit) const {
    const std::int64_t by_bytes = kv_bytes_ / data_.policy.worker_bytes + 1;
    return static_cast<int>(std::min({static_cast<std::int64_t>(limit), num_items(), by_bytes}));
  }

  /// Before the first worker starts: threads that share the work, and the run of neighbouring units that each begins with.
  /// A unit is the heads of one chunk where they go step by step together, else an item.
  void share(int num_slots) {
    num_slots_ = num_slots;
    // Together they read memory in order, but one worker takes what several could.
    if (num_slots > 1) heads_per_step_ = std::clamp<std::int64_t>(num_items() / (2 * num_slots), 1, heads_per_step_);
    unit_items_ = std::max(heads_per_step_, shared::ceil_div(num_items(), std::int64_t{1} << 31));
    const std::int64_t units = shared::ceil_div(num_items(), unit_items_);
    for (int slot = 0; slot < num_slots; ++slot) {
      run_of(slot).store(run(units * slot / num_slots, units * (slot + 1) / num_slots), std::memory_order_relaxed);
    }
  }

  /// Takes units from the front of its own run, whose rows the unit before has prefetched, then the back half of what
  /// another worker has left, until no unit is left. Neighbours are chunks of one stream; where tokens stand before heads they
  /// are the heads of one chunk, because the processor's own prefetcher brings the next head's rows along (Ice Lake, 2 threads, f16, 4 KV heads, share of a
  /// plain read at 4 and 8 rows: 0.49 0.37 by stream, 0.57 0.40 by chunk; docs/kernel-cpu.md).
  void work(int slot) {
    std::int64_t next = -1;
    do {
      std::uint64_t left = run_of(slot).load(std::memory_order_relaxed);
      while (begin_of(left) < end_of(left)) {
        const std::uint64_t rest = run(begin_of(left) + 1, end_of(left));
        if (!run_of(slot).compare_exchange_weak(left, rest, std::memory_order_relaxed)) continue;
        run_unit(begin_of(left), slot, begin_of(left) == next);
        next = begin_of(left) + 1;
        left = run_of(slot).load(std::memory_order_relaxed);
      }
    } while (take_from_others(slot));
  }

 private:
  struct Item {
    std::int64_t seq;
    std::int64_t kv_head;
    std::int64_t row_block;
    std::int64_t chunk;
    std::int64_t num_chunks;
  };

  // A run of units [begin, end) in one word. A unit that was taken is in no run again, so equal words are equal runs.
  static std::uint64_t run(std::int64_t begin, std::int64_t end) {
    return static_cast<std::uint64_t>(begin) << 32 | static_cast<std::uint64_t>(end);
  }
  static std::int64_t begin_of(std::uint64_t run) { return static_cast<std::int64_t>(run >> 32); }
  static std::int64_t end_of(std::uint64_t run) { return static_cast<std::int64_t>(run & 0xffffffff); }
  [[nodiscard]] std::atomic_ref<std::uint64_t> run_of(int slot) const {
    return std::atomic_ref<std::uint64_t>(runs_[slot * kRunWords]);
  }

  bool take_from_others(int slot) {
    for (int other = (slot + 1) % num_slots_; other != slot; other = (other + 1) % num_slots_) {
      std::uint64_t left = run_of(other).load(std::memory_order_relaxed);
      while (begin_of(left) < end_of(left)) {
        const std::int64_t middle = (begin_of(left) + end_of(left)) / 2;
        if (!run_of(other).compare_exchange_weak(left, run(begin_of(left), middle), std::memory_order_relaxed))
          continue;
        run_of(slot).store(run(middle, end_of(left)), std::memory_order_relaxed);
        return true;
      }
    }
    return false;
  }

  void run_unit(std::int64_t unit, int slot, bool is_next) {
    const std::int64_t end = std::min(num_items(), (unit + 1) * unit_items_);
    const std::int64_t begin = unit * unit_items_;
    for (std::int64_t item = begin; item < end;) item += run_items(item, end, slot, !is_next && item == begin);
  }

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

  /// Items from `begin` on that are heads of one chunk, at most heads_per_step_. Returns how many they were.
  int run_items(std::int64_t begin, std::int64_t end, int slot, bool starts_cold) {
    Item items[kMaxHeadsPerStep];
    int count = 0;
    for (; count < heads_per_step_ && begin + count < end; ++count) {
      items[count] = item_at(begin + count);
      if (items[count].seq != items[0].seq || items[count].chunk != items[0].chunk) break;
    }
    ChunkTask tasks[kMaxHeadsPerStep];
    for (int i = 0; i < count; ++i) tasks[i] = chunk_task(items, count, i, slot, starts_cold);
    target_.attend_chunk(tasks, count);
    for (int i = 0; i < count; ++i) end_item(items[i]);
    return count;
  }

  void end_item(const Item& item) {
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

  /// A token's heads are neighbours, so that a step of all of them reads memory in order.
  [[nodiscard]] bool side_by_side(const TensorView& view, KvFormat format, std::int64_t dims) const {
    return p_.num_kv_heads > 1 && stride_bytes(format, view.head_stride) == format_bytes(format, dims) &&
           view.token_stride >= p_.num_kv_heads * view.head_stride;
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

  [[nodiscard]] ChunkTask chunk_task(const Item* items, int num_items, int idx, int slot, bool starts_cold) const {
    const Item& item = items[idx];
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
    t.pair_dot = data_.policy.pair_dot >= 1;
    t.pair_dot_values = data_.policy.pair_dot == 2;
    t.row_tile = data_.policy.row_tile;
    t.step_tokens = data_.policy.step_tokens;
    // Rows with gaps, and heads taken together, are not what a processor's own streams follow.
    const bool packed = in_.k.token_stride == p_.head_dim_qk && in_.v.token_stride == p_.head_dim_v;
    t.reads_parts = num_items == 1 && packed && data_.reads_parts;
    t.steps_per_turn = num_items == 1 && packed ? data_.steps_per_turn : 1;
    t.prefetch_tokens = data_.policy.prefetch_tokens;
    t.prefetch_lines = data_.policy.prefetch_lines;
    t.prefetch_level = data_.policy.prefetch_level;
    t.k_fetch_bytes = format_bytes(p_.k_format, p_.head_dim_qk);
    t.v_fetch_bytes = format_bytes(p_.v_format, p_.head_dim_v);
    t.k_fetch = t.k;
    t.v_fetch = t.v;
    t.num_fetchers = 1;
    t.starts_cold = starts_cold;
    if (num_items > 1) {
      // Even where a stream alone needs no requests: none of the processor's prefetchers follows several strided ones.
      if (t.prefetch_tokens == 0) t.prefetch_tokens = t.step_tokens;
      const std::int64_t heads = items[num_items - 1].kv_head - items[0].kv_head;
      t.k_fetch_bytes += stride_bytes(p_.k_format, heads * in_.k.head_stride);
      t.v_fetch_bytes += stride_bytes(p_.v_format, heads * in_.v.head_stride);
      t.k_fetch = stream_of(in_.k, p_.k_format, items[0]);
      t.v_fetch = stream_of(in_.v, p_.v_format, items[0]);
      t.fetcher_idx = idx;
      t.num_fetchers = num_items;
    }
    t.scratch = reinterpret_cast<float*>(scratch_ + static_cast<std::size_t>(slot * data_.policy.heads_per_step + idx) *
                                                        data_.workspace.scratch_bytes);
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
  std::uint64_t* runs_;
  std::int32_t* counters_;
  float* partial_lse_;
  float* partial_o_;
  char* scratch_;
  bool heads_inside_;  // tokens before heads in memory: a chunk's heads run one after the other
  std::int64_t heads_per_step_;
  std::int64_t kv_bytes_ = 0;  // of the keys that any row sees
  int num_slots_ = 1;
  std::int64_t unit_items_ = 1;
};

}  // namespace

void run(const core::PlanData& data, const Inputs& inputs, const Outputs& outputs, void* workspace,
         const Context& context) {
  if (data.problem.num_seqs == 0 || data.problem.q_len == 0) return;
  Call call(data, inputs, outputs, workspace);
  const int num_slots = call.num_workers(context.num_threads > 0 ? context.num_threads : data.device.num_threads);
  call.share(num_slots);
  if (num_slots <= 1) {
    call.work(0);
  } else if (context.parallel_for != nullptr) {
    context.parallel_for(
        context.parallel_for_host, num_slots,
        [](void* c, std::int64_t slot) { static_cast<Call*>(c)->work(static_cast<int>(slot)); }, &call);
  } else {
    Pool::shared().run(
        num_slots, [](void* c, int slot) { static_cast<Call*>(c)->work(slot); }, &call);
  }
}

}  // namespace kvonce::cpu
