// Drives the steps of attend.hpp over one ChunkTask: which row tiles, which token steps, whole or ragged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "cpu/affine.hpp"
#include "cpu/attend.hpp"
#include "cpu/bias.hpp"
#include "cpu/task.hpp"
#include "cpu/tile_kernels.hpp"

namespace kvonce::cpu {

template <class S>
void store_row(const ChunkTask& task, const float* o, std::int64_t o_stride, float maximum, float sum,
               std::int64_t row) {
  float* partial_o = task.partial_o + row * round_up(task.head_dim_v, kPadFloats);
  float* partial_lse = task.partial_lse + row;
  switch (task.v_format) {
    case KvFormat::bf16:
    case KvFormat::mlx_int4:  // dims in the same order
      store_partial<S, KvFormat::bf16>(o, o_stride, maximum, sum, task.head_dim_v, partial_o, partial_lse);
      break;
    default:
      store_partial<S, KvFormat::f32>(o, o_stride, maximum, sum, task.head_dim_v, partial_o, partial_lse);
      break;
  }
}

/// Rows [first, first + count) of the task's rows as one tile.
struct RowTile {
  std::int64_t first_row;  // of the stream
  int rows;
  shared::TokenRange seen_by_all;   // keys that every row of the tile sees
  shared::TokenRange seen_by_some;  // keys that some row sees
};

template <class S>
class ChunkRunner {
 public:
  explicit ChunkRunner(const ChunkTask& task)
      : task_(task),
        qk_floats_(kQueryCopies * round_up(task.head_dim_qk, kPadFloats)),
        o_floats_(round_up(task.head_dim_v, kPadFloats)),
        k_row_bytes_(row_bytes(task.k_format, task.head_dim_qk)),
        v_row_bytes_(row_bytes(task.v_format, task.head_dim_v)),
        num_tiles_(static_cast<int>(shared::ceil_div(task.num_rows, task.row_tile))),
        q_(task.scratch),
        o_(q_ + task.num_rows * qk_floats_),
        scores_(o_ + task.num_rows * o_floats_),
        maximum_(scores_ + task.steps_per_turn * 2 * task.num_rows * task.step_tokens),
        sum_(maximum_ + task.num_rows * kPadFloats),
        bias_(sum_ + task.num_rows * kPadFloats),
        levels_(bias_ + kMaxRowTile * task.step_tokens + kPadFloats),
        k_groups_(num_groups(task.k_format, task.head_dim_qk, task.quant_group)),
        v_groups_(num_groups(task.v_format, task.head_dim_v, task.quant_group)),
        v_levels_(levels_ + affine_step_floats(k_groups_, task.step_tokens)),
        seen_(reinterpret_cast<std::uint8_t*>(v_levels_ + affine_step_floats(v_groups_, task.step_tokens))),
        k_step_(task.k, task.k_token_stride, task.k_scales, task.k_biases, task, k_groups_, levels_),
        v_step_(task.v, task.v_token_stride, task.v_scales, task.v_biases, task, v_groups_, v_levels_),
        small_rows_(static_cast<int>(task.num_rows / num_tiles_)),
        one_row_(find_kernels<S>(1, task)),
        small_(find_kernels<S>(small_rows_, task)),
        large_(find_kernels<S>(task.num_rows % num_tiles_ == 0 ? small_rows_ : small_rows_ + 1, task)) {}

  void start() {
    for (int i = 0; i < num_tiles_; ++i) start_tile(i);
    next_step_ = seen_from(task_.chunk.begin);
    if (task_.starts_cold) {
      StepPrefetcher<S> ahead = keys_ahead(0, next_step_ - task_.prefetch_tokens);
      ahead.advance(INT32_MAX);
    }
  }

  /// The keys of the next token steps, steps_per_turn of them. Returns false when none is left.
  bool score_steps() {
    for (num_steps_ = 0; num_steps_ < task_.steps_per_turn && next_step_ < task_.chunk.end; ++num_steps_) {
      const shared::TokenRange step = steps_[num_steps_] = step_at(next_step_);
      next_step_ = seen_from(next_step_ + task_.step_tokens);
      k_step_.load(step);
      slot_ = num_steps_;
      for (int i = 0; i < num_tiles_; ++i) score_tile(i, step);
    }
    return num_steps_ > 0;
  }
  /// The softmax and the values of the steps that score_steps() began.
  void value_steps() {
    for (slot_ = 0; slot_ < num_steps_; ++slot_) {
      v_step_.load(steps_[slot_]);
      for (int i = 0; i < num_tiles_; ++i) value_tile(i, steps_[slot_]);
    }
  }

  void finish() {
    for (int i = 0; i < num_tiles_; ++i) finish_tile(i);
  }

 private:
  // Tiles differ by at most one row: 9 rows at row_tile 8 run as 5 + 4, not 8 + 1.
  [[nodiscard]] std::int64_t tile_begin(int i) const { return task_.num_rows * i / num_tiles_; }

  /// Tile i; a single tile is worked out once per chunk.
  [[nodiscard]] const RowTile& tile(int i) {
    if (i != tile_index_) {
      tile_ = make_tile(i);
      tile_index_ = i;
    }
    return tile_;
  }

  [[nodiscard]] RowTile make_tile(int i) const {
    const std::int64_t begin = tile_begin(i);
    const std::int64_t end = tile_begin(i + 1);
    const std::int64_t first_row = task_.row_begin + begin;
    const shared::TokenRange oldest = visible(task_, first_row);
    const shared::TokenRange newest = visible(task_, task_.row_begin + end - 1);
    return {first_row, static_cast<int>(end - begin), {newest.begin, oldest.end}, {oldest.begin, newest.end}};
  }

  [[nodiscard]] shared::TokenRange step_at(std::int64_t token) const {
    const std::int64_t end = token + task_.step_tokens;
    return {token, end < task_.chunk.end ? end : task_.chunk.end};
  }

  /// The first step from `token` on of which the mask shows some row some key; the others' K and V are not touched.
  [[nodiscard]] std::int64_t seen_from(std::int64_t token) const {
    if (task_.rules.mask == MaskKind::none) return token;
    while (token < task_.chunk.end &&
           seen_by_rows(task_, task_.row_begin, task_.num_rows, step_at(token)) == Seen::none) {
      token += task_.step_tokens;
    }
    return token;
  }

  [[nodiscard]] const TileKernels<S>& kernels(const RowTile& t) const {
    return t.rows == small_rows_ ? small_ : large_;
  }

  [[nodiscard]] float* q_of(int i) const { return q_ + tile_begin(i) * qk_floats_; }
  [[nodiscard]] float* o_of(int i) const { return o_ + tile_begin(i) * o_floats_; }
  [[nodiscard]] float* scores_of(int i) const {
    return scores_ + 2 * (slot_ * task_.num_rows + tile_begin(i)) * task_.step_tokens;
  }
  [[nodiscard]] float* maximum_of(int i) const { return maximum_ + i * kPadFloats; }
  [[nodiscard]] float* sum_of(int i) const { return sum_ + i * kPadFloats; }
  /// What tile i sees of the current step, then one byte per token (fill_bias), valid where that is `some`.
  [[nodiscard]] std::uint8_t* seen_of(int i) const {
    return seen_ + (slot_ * num_tiles_ + i) * (task_.step_tokens + 1);
  }

  [[nodiscard]] const void* k_at(std::int64_t token) {
    if (k_groups_ > 0) return k_step_.row(token);
    return static_cast<const char*>(task_.k) + token * task_.k_token_stride * bytes_of(task_.k_format);
  }
  [[nodiscard]] const void* v_at(std::int64_t token) {
    if (v_groups_ > 0) return v_step_.row(token);
    return static_cast<const char*>(task_.v) + token * task_.v_token_stride * bytes_of(task_.v_format);
  }

  /// K or V of the step that begins at token `begin`, asked for while rows of `paced_by` bytes are worked on: this task's part of
  /// it. Only the first tile of a step waits for memory.
  [[nodiscard]] StepPrefetcher<S> step_ahead(int i, std::int64_t begin, const void* data, std::int64_t token_stride,
                                             std::int64_t fetch_bytes, std::int64_t element,
                                             std::int64_t paced_by) const {
    const std::int64_t end = begin + task_.step_tokens < task_.kv_len ? begin + task_.step_tokens : task_.kv_len;
    if (i != 0 || task_.prefetch_tokens == 0 || begin >= end) return {};
    const std::int64_t first = begin + (end - begin) * task_.fetcher_idx / task_.num_fetchers;
    const std::int64_t last = begin + (end - begin) * (task_.fetcher_idx + 1) / task_.num_fetchers;
    if (first == last) return {};
    const std::int64_t stride_bytes = token_stride * element;
    return {static_cast<const char*>(data) + first * stride_bytes,
            stride_bytes,
            fetch_bytes,
            last - first,
            paced_by * task_.num_fetchers,
            stride_bytes == fetch_bytes ? task_.prefetch_lines : 1,  // a gap's line is nobody's neighbour
            task_.prefetch_level};
  }
  /// A step's values are fetched while its keys are scored, and the next step's keys while the values are added up, so that
  /// little passes through the cache between the request and the use. Against keys and values each one whole step
  /// ahead, share of a plain read at 1, 4 and 8 rows, bf16 d128 (docs/kernel-cpu.md says how): Ice Lake, 1 thread,
  /// 0.88 0.80 0.61 to 0.90 0.83 0.64, Sapphire Rapids, 2 threads, 0.86 0.82 0.74 to 0.90 0.83 0.74.
  [[nodiscard]] StepPrefetcher<S> values_ahead(int i, std::int64_t token) const {
    if (task_.v == task_.k) return {};  // V that is a view of K was fetched with K
    const std::int64_t lead = task_.prefetch_tokens - task_.step_tokens;
    return step_ahead(i, token + (lead > 0 ? lead : 0), task_.v_fetch, task_.v_token_stride, task_.v_fetch_bytes,
                      bytes_of(task_.v_format), k_row_bytes_);
  }
  [[nodiscard]] StepPrefetcher<S> keys_ahead(int i, std::int64_t token) const {
    return step_ahead(i, token + task_.prefetch_tokens, task_.k_fetch, task_.k_token_stride, task_.k_fetch_bytes,
                      bytes_of(task_.k_format), v_row_bytes_);
  }

  /// A step that is read in parts, with what is read after it; no requests for other counts of tokens.
  [[nodiscard]] StepPrefetcher<S> parts_ahead(const void* rows, const void* next, std::int64_t count) const {
    if (!has_parts<S>(count)) return {};
    return {static_cast<const char*>(rows), static_cast<const char*>(next), k_row_bytes_, count};
  }

  void start_tile(int i) {
    const RowTile& t = tile(i);
    kernels(t).load_row_tile(task_, t.first_row, t.rows, q_of(i));
    float* o = o_of(i);
    for (std::int64_t k = 0; k < t.rows * o_floats_; ++k) o[k] = 0.0F;
    for (std::int64_t k = 0; k < S::width; ++k) {
      maximum_of(i)[k] = -INFINITY;
      sum_of(i)[k] = 0.0F;
    }
  }

  [[nodiscard]] Seen seen_by_tile(const RowTile& t, const shared::TokenRange& tokens) const {
    if (tokens.begin >= t.seen_by_some.end || t.seen_by_some.begin >= tokens.end) return Seen::none;
    if (task_.rules.mask != MaskKind::none) return seen_by_rows(task_, t.first_row, t.rows, tokens);
    return t.seen_by_all.begin <= tokens.begin && tokens.end <= t.seen_by_all.end ? Seen::all : Seen::some;
  }

  void score_tile(int i, const shared::TokenRange& tokens) {
    const RowTile& t = tile(i);
    const Seen seen = seen_by_tile(t, tokens);
    *seen_of(i) = static_cast<std::uint8_t>(seen);
    if (seen == Seen::none) return;
    const std::int64_t count = tokens.end - tokens.begin;
    StepPrefetcher<S> ahead =
        task_.reads_parts ? parts_ahead(k_at(tokens.begin), v_at(tokens.begin), count) : values_ahead(i, tokens.begin);
    kernels(t).score_tokens(k_at(tokens.begin), task_.k_token_stride, count, q_of(i), task_.head_dim_qk,
                            task_.scale_log2e, ahead, scores_of(i));
    if (seen == Seen::some) fill_bias(task_, t.first_row, t.rows, tokens, bias_, seen_of(i) + 1);
    if (seen == Seen::some || changes_all(task_.rules)) {
      change_scores<S>(task_, t.first_row, t.rows, tokens, seen == Seen::some ? bias_ : nullptr, scores_of(i));
    }
  }

  void value_tile(int i, const shared::TokenRange& tokens) {
    const auto seen = static_cast<Seen>(*seen_of(i));
    if (seen == Seen::none) return;
    const std::int64_t count = tokens.end - tokens.begin;
    kernels(tile(i)).update_softmax(scores_of(i), count, maximum_of(i), sum_of(i), o_of(i), o_floats_);
    StepPrefetcher<S> ahead =
        task_.reads_parts
            ? parts_ahead(v_at(tokens.begin), next_step_ + count <= task_.kv_len ? k_at(next_step_) : nullptr, count)
            : keys_ahead(i, next_step_ - task_.step_tokens);
    if (seen == Seen::all) {
      add_values(i, tokens, 0, count, ahead);
    } else {
      add_seen_values(i, tokens, ahead);
    }
  }

  /// Tokens [begin, end) of the step, all rows of tile i.
  void add_values(int i, const shared::TokenRange& tokens, std::int64_t begin, std::int64_t end,
                  StepPrefetcher<S>& ahead) {
    const RowTile& t = tile(i);
    const int lanes = lane_rows(t.rows);
    kernels(t).accumulate_values(v_at(tokens.begin + begin), task_.v_token_stride, end - begin,
                                 scores_of(i) + begin * lanes, lanes, task_.head_dim_v, ahead, o_of(i),
                                 t.rows * S::width);
  }

  /// Runs of tokens that the same rows see: all rows of the tile at once, or row by row.
  void add_seen_values(int i, const shared::TokenRange& tokens, StepPrefetcher<S>& ahead) {
    const RowTile& t = tile(i);
    const int lanes = lane_rows(t.rows);
    const std::uint8_t* seen = seen_of(i) + 1;
    const std::int64_t count = tokens.end - tokens.begin;
    StepPrefetcher<S> none;
    for (std::int64_t begin = 0, end = 0; begin < count; begin = end) {
      for (end = begin + 1; end < count && seen[end] == seen[begin];) ++end;
      if (seen[begin] == (1 << t.rows) - 1) {
        add_values(i, tokens, begin, end, ahead);
        continue;
      }
      for (int r = 0; r < t.rows; ++r) {
        if ((seen[begin] >> r & 1) == 0) continue;
        one_row_.accumulate_values(v_at(tokens.begin + begin), task_.v_token_stride, end - begin,
                                   scores_of(i) + begin * lanes + r, lanes, task_.head_dim_v, none,
                                   o_of(i) + r * S::width, t.rows * S::width);
      }
    }
  }

  void finish_tile(int i) {
    const RowTile& t = tile(i);
    const int stride = lane_rows(t.rows);
    for (int r = 0; r < t.rows; ++r) {
      float sum = 0.0F;
      for (int lane = r; lane < S::width; lane += stride) sum += sum_of(i)[lane];
      store_row<S>(task_, o_of(i) + r * S::width, t.rows * S::width, maximum_of(i)[r], sum, t.first_row + r);
    }
  }

  const ChunkTask& task_;
  std::int64_t qk_floats_;
  std::int64_t o_floats_;
  std::int64_t k_row_bytes_;
  std::int64_t v_row_bytes_;
  int num_tiles_;
  float* q_;
  float* o_;
  float* scores_;
  float* maximum_;
  float* sum_;
  float* bias_;    // of one tile
  float* levels_;  // of K's step, then of V's
  std::int64_t k_groups_;
  std::int64_t v_groups_;
  float* v_levels_;
  std::uint8_t* seen_;  // of every tile
  shared::TokenRange steps_[kMaxStepsPerTurn]{};
  std::int64_t num_steps_ = 0;
  std::int64_t slot_ = 0;  // of steps_ and of the scores kept for them
  AffineStep<S> k_step_;
  AffineStep<S> v_step_;
  std::int64_t next_step_ = 0;
  int small_rows_;  // tiles have this many rows or one more
  int tile_index_ = -1;
  RowTile tile_{};
  TileKernels<S> one_row_;
  TileKernels<S> small_;
  TileKernels<S> large_;
};

template <class S>
void attend_chunk(const ChunkTask* tasks, int num_tasks) {
  if (num_tasks == 1) {
    ChunkRunner<S> runner(tasks[0]);
    runner.start();
    while (runner.score_steps()) runner.value_steps();
    runner.finish();
    return;
  }
  alignas(ChunkRunner<S>) std::byte storage[kMaxHeadsPerStep][sizeof(ChunkRunner<S>)];
  ChunkRunner<S>* runners[kMaxHeadsPerStep];
  for (int i = 0; i < num_tasks; ++i) {
    runners[i] = new (storage[i]) ChunkRunner<S>(tasks[i]);
    runners[i]->start();
  }
  for (bool any = true; any;) {
    any = false;
    bool scored[kMaxHeadsPerStep];
    for (int i = 0; i < num_tasks; ++i) any |= scored[i] = runners[i]->score_steps();
    for (int i = 0; i < num_tasks; ++i) {
      if (scored[i]) runners[i]->value_steps();
    }
  }
  for (int i = 0; i < num_tasks; ++i) runners[i]->finish();
}

}  // namespace kvonce::cpu
