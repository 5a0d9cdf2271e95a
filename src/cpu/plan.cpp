// What the CPU serves and how: refusals, kernel, row tile, chunks, workspace. Integers only.
#include <algorithm>
#include <string>

#include "core/refuse.hpp"
#include "core/served.hpp"
#include "cpu/backend.hpp"
#include "cpu/targets.hpp"
#include "cpu/task.hpp"

namespace kvonce::cpu {
namespace {

struct Dims {
  std::int64_t qk;
  std::int64_t v;
};

constexpr Dims kHeadDims[] = {
#define KVONCE_HEAD_DIMS(qk, v) {qk, v},
#include "shared/instances.def"
};

/// Rows that share one pass. 64 rows of q, o and scores at head dim 128 take 80 KB of a worker's private cache: a size, not
/// a measurement; no seed geometry has more rows.
constexpr std::int64_t kRowsPerWorker = 64;
constexpr std::int64_t kMinStepFloats = 16;

std::int64_t choose_chunk_tokens(const Problem& p) {
  // A chunk streams 256 KB, or 16 times what its partials weigh where there are many rows: joining chunks then costs a
  // few percent, and short caches still split over several threads. 512 KB gained 0 to 4 % in bf16 and nothing in f16
  // (docs/kernel-cpu.md), and leave threads half as many pieces to share.
  constexpr std::int64_t kChunkBytes = 256 * 1024;
  // Blocks count as 16-bit values: their tokens take as long, and longer chunks would leave threads fewer pieces to share.
  const auto row_bytes = [](KvFormat format, std::int64_t dims) {
    return std::max(format_bytes(format, dims), 2 * dims);
  };
  const std::int64_t token_bytes =
      row_bytes(p.k_format, p.head_dim_qk) + (p.v_is_k_prefix ? 0 : row_bytes(p.v_format, p.head_dim_v));
  const std::int64_t rows = std::min(p.rows_per_stream(), kRowsPerWorker);
  const std::int64_t bytes = std::max(kChunkBytes, 16 * rows * p.head_dim_v * 4);
  return std::clamp<std::int64_t>(bytes / token_bytes / 64 * 64, 128, 4096);
}

/// A step's K rows take 32 KB: four parts of two pages that StepPrefetcher fetches side by side, and little work at the
/// borders of steps. Where several row tiles go through the step it takes 16 KB, so that the later ones find it in L1.
/// Ice Lake, 2 threads, f16 d128, GB/s per thread at 1, 4 and 8 rows: 128 tokens 12.3 9.3 7.6, 64 tokens 12.1 9.0 7.5, 256 tokens
/// 12.5 9.4 7.5; 32 tokens are 10 to 15 % slower (parts shorter than a page).
std::int64_t choose_step_tokens(const Problem& p, const Policy& policy) {
  const std::int64_t bytes = (p.rows_per_stream() > policy.row_tile ? 16 : 32) * 1024;
  std::int64_t tokens = 128;  // powers of two, so that steps fill the usual chunk sizes
  while (tokens > 16 && tokens * format_bytes(p.k_format, p.head_dim_qk) > bytes) tokens /= 2;
  return tokens;
}

/// From five rows on, 16-bit formats are bound by arithmetic, and a request costs more than it gains where the processor
/// fetches cache lines by the pair. Ice Lake, 2 threads, GB/s per thread with a request for every and for every second line:
/// bf16 d128 8 rows 7.4 and 7.7, 1 row 12.0 and 8.2; f32 8 rows 10.1 and 9.1. Sapphire Rapids, 2 threads, share of a plain read:
/// bf16 d128 8 rows 0.74 and 0.65, 1 row 0.86 and 0.81.
std::int64_t choose_prefetch_lines(const Problem& p, const Policy& policy, const Device& device) {
  const std::int64_t rows = std::min(p.rows_per_stream(), policy.row_tile);
  return device.fetches_line_pairs && rows > 4 && p.k_format != KvFormat::f32 ? 2 : 1;
}

/// As many as leave a step's K of all heads 128 KB and their rows what kRowsPerWorker leaves them, in even parts. One thread
/// of Zen 4, layout=nhd, us with the heads of a chunk one after the other and step by step together: f16 9q/3kv d64 kv 7500
/// 433 to 383, 32q/8kv d64 kv 4096 984 to 631, 32q/4kv d128 kv 8192 1798 to 1621, 32q/8kv d128 2607 to 1781; bf16 845 to 498, 1496
/// to 1219, 2737 to 1622; 14q/2kv d64, kv 4096, 209 to 219 in f16, 160 to 172 in bf16.
std::int64_t choose_heads_per_step(const Problem& p, const Policy& policy) {
  const std::int64_t step_bytes = policy.step_tokens * format_bytes(p.k_format, p.head_dim_qk);
  const std::int64_t rows = std::clamp<std::int64_t>(p.rows_per_stream(), 1, kRowsPerWorker);
  const std::int64_t most = std::min({std::int64_t{kMaxHeadsPerStep}, 128 * 1024 / step_bytes, kRowsPerWorker / rows});
  const std::int64_t parts = shared::ceil_div(p.num_kv_heads, std::max<std::int64_t>(1, most));
  return shared::ceil_div(p.num_kv_heads, parts);
}

/// Whether the processor's own prefetchers follow K and V of a stream's only row.
bool is_stream(const Problem& p, const Policy& policy) {
  return p.rows_per_stream() == 1 && policy.prefetch_level == 2 && policy.prefetch_tokens == 0;
}

/// 128 KB of K where the processor's own streams follow a stream's only row of 256 bytes or more: they start anew wherever K
/// and V alternate. No bit depends on it. Zen 4, kv 8192, one thread, share of a plain read with turns of a step and of 128 KB,
/// medians of three runs of both builds in turn: d128 f16 0.76 to 0.83, bf16 0.71 to 0.81, d64 f32 0.83 to 0.87;
/// two threads, which share the memory, 1.0 to 1.1x.
std::int64_t choose_steps_per_turn(const Problem& p, const Policy& policy, bool reads_parts) {
  constexpr std::int64_t kTurnBytes = 128 * 1024;
  const std::int64_t row_bytes = format_bytes(p.k_format, p.head_dim_qk);
  if (reads_parts || !is_stream(p, policy) || p.k_format > KvFormat::bf16 || row_bytes < 256) return 1;
  return std::clamp<std::int64_t>(kTurnBytes / (policy.step_tokens * row_bytes), 1, kMaxStepsPerTurn);
}

/// float32, 128 dims, vectors of 16 floats. Zen 4, GB/s without and with it, builds in turn in one process, no file kept: one thread
/// 8q/8kv kv 8192 19.9 to 26.7 of 30.0 that are read (other calls 1.12 to 1.27x), two threads 32q/32kv 34.1 to 40.4. 16 bits gain 1.03 to 1.07 there and lose
/// 0.92 where heads lie side by side, whose values are asked for in their tokens' order; d64 gains 1.05 and loses 0.94.
bool choose_reads_parts(const Problem& p, const Policy& policy, const Target& target) {
  return is_stream(p, policy) && p.k_format == KvFormat::f32 && p.v_format == KvFormat::f32 &&
         p.head_dim_qk == kPartsDims && p.head_dim_v == kPartsDims && target.one_pass_dims == kPartsDims;
}

/// Below this many K and V bytes per worker a call wakes no further thread: one Ice Lake core reads 96 KB in 7 us (13 GB/s),
/// about what waking a sleeping thread takes there (docs/decisions/0002-own-thread-pool.md: 5.6 us).
constexpr std::int64_t kWorkerBytes = 96 * 1024;

/// `lowest` is the field's way of saying "choose".
void require_not_negative(const char* name, std::int64_t value, std::int64_t lowest) {
  if (value >= lowest) return;
  core::refuse(ErrorCode::InvalidArgument, name, std::to_string(value), std::to_string(lowest) + " (choose) or more");
}

void decide_policy(core::PlanData& data, const Target& target, const Policy& asked) {
  const Problem& p = data.problem;
  Policy& policy = data.policy;
  policy = asked;
  require_not_negative("policy.row_tile", policy.row_tile, 0);
  require_not_negative("policy.rows_per_worker", policy.rows_per_worker, 0);
  require_not_negative("policy.chunk_tokens", policy.chunk_tokens, 0);
  require_not_negative("policy.step_tokens", policy.step_tokens, 0);
  require_not_negative("policy.prefetch_tokens", policy.prefetch_tokens, -1);
  require_not_negative("policy.prefetch_lines", policy.prefetch_lines, 0);
  require_not_negative("policy.pair_dot", policy.pair_dot, -1);
  require_not_negative("policy.worker_bytes", policy.worker_bytes, 0);
  require_not_negative("policy.prefetch_level", policy.prefetch_level, 0);
  require_not_negative("policy.heads_per_step", policy.heads_per_step, 0);
  if (policy.splits != 0 || policy.cluster != -1 || policy.join_blocks != 0) {
    core::refuse(ErrorCode::InvalidArgument, "policy.splits, policy.cluster, policy.join_blocks",
                 std::to_string(policy.splits) + ", " + std::to_string(policy.cluster) + ", " +
                     std::to_string(policy.join_blocks),
                 "0, -1, 0 on the cpu backend, which has no thread blocks");
  }
  if (policy.body != 0 || policy.simdgroups != 0) {
    core::refuse(ErrorCode::InvalidArgument, "policy.body, policy.simdgroups",
                 std::to_string(policy.body) + ", " + std::to_string(policy.simdgroups),
                 "0, 0 on the cpu backend, which has no simdgroups");
  }
  if (policy.worker_bytes == 0) policy.worker_bytes = kWorkerBytes;
  if (policy.row_tile == 0) {
    // The largest that the registers hold. Share of the roof with tiles of 8 and 4, 8 rows, Ice Lake: 32q/4kv d128
    // 0.64 and 0.51, 64q/8kv d64 0.59 and 0.44.
    policy.row_tile = target.max_row_tile;
    if (policy.rows_per_worker > 0) policy.row_tile = std::min(policy.row_tile, policy.rows_per_worker);
  }
  if (policy.row_tile > target.max_row_tile) {
    core::refuse(ErrorCode::InvalidArgument, "policy.row_tile", std::to_string(policy.row_tile),
                 "1 to " + std::to_string(target.max_row_tile) + " on target " + target.name);
  }
  if (policy.rows_per_worker == 0) policy.rows_per_worker = kRowsPerWorker;
  if (policy.rows_per_worker < policy.row_tile || policy.rows_per_worker > 8192) {
    core::refuse(ErrorCode::InvalidArgument, "policy.rows_per_worker", std::to_string(policy.rows_per_worker),
                 "row_tile = " + std::to_string(policy.row_tile) + " to 8192");
  }
  if (policy.chunk_tokens == 0) policy.chunk_tokens = choose_chunk_tokens(p);
  if (policy.chunk_tokens < 0 || policy.chunk_tokens > (1LL << 31)) {
    core::refuse(ErrorCode::InvalidArgument, "chunk_tokens", std::to_string(policy.chunk_tokens), "1 to 2^31");
  }
  if (policy.step_tokens == 0) policy.step_tokens = choose_step_tokens(p, policy);
  if (policy.step_tokens % kMinStepFloats != 0 || policy.step_tokens > kMaxStepTokens) {
    core::refuse(ErrorCode::InvalidArgument, "policy.step_tokens", std::to_string(policy.step_tokens),
                 "a multiple of 16 up to 1024");
  }
  // Zen 4, 2 threads, GB/s at levels 1 and 2, 32q/32kv, 32q/8kv, 32q/4kv d128 and 64q/8kv d64, kv 8192: bf16 19.2 to 27.4, 23.1 to 28.3,
  // 22.1 to 23.4, 20.1 to 21.3; f16 19.3 to 27.0, 22.6 to 26.6, 17.7 to 17.9, 14.8 to 14.9; f32 22.4 to 34.5, 24.9 to 34.2, 18.9 to 23.8,
  // 19.7 to 24.2; AVX2 f16 24.2 to 28.6, 23.9 to 27.1, 16.8 to 18.3, 15.8 to 17.7.
  if (policy.prefetch_level == 0) policy.prefetch_level = data.device.follows_prefetches ? 2 : 1;
  if (policy.prefetch_level > 2) {
    core::refuse(ErrorCode::InvalidArgument, "policy.prefetch_level", std::to_string(policy.prefetch_level), "1 or 2");
  }
  // One step ahead. Share of a plain read at 1 and 8 rows, bf16 d128, Ice Lake, 2 threads: 0.92 and 0.58, without requests 0.57
  // and 0.34. Two steps ahead won nothing twice in `kvonce tune` (the same, busy; seed geometries, f32, f16, bf16).
  // None at level 2 with one row: K is read row by row, V too where one pass holds a row, and the processor's own prefetchers do
  // better. Zen 4, kv 8192, one thread, GB/s with requests and without: 32q/32kv d128 f16 20.7 to 23.1, bf16 20.2 to 23.2, f32 21.7
  // to 22.2, d64 f16 20.4 to 25.6; where V takes two passes, 8q/8kv d256 f16 20.3 to 15.3, AVX2 32q/32kv d128 f16 22.8 to 14.9.
  // (Measured with two sums a row; the one that keeps score_tokens' bits is 2 to 5 % slower in 16 bits, 5 % faster in f32.)
  const bool one_row_in_order = policy.prefetch_level == 2 && p.rows_per_stream() == 1;
  if (policy.prefetch_tokens < 0) {
    policy.prefetch_tokens = one_row_in_order && p.head_dim_v <= target.one_pass_dims ? 0 : policy.step_tokens;
  }
  if (policy.prefetch_lines == 0) policy.prefetch_lines = choose_prefetch_lines(p, policy, data.device);
  if (policy.prefetch_lines > 2) {
    core::refuse(ErrorCode::InvalidArgument, "policy.prefetch_lines", std::to_string(policy.prefetch_lines), "1 or 2");
  }
  if (policy.heads_per_step == 0) policy.heads_per_step = choose_heads_per_step(p, policy);
  if (policy.heads_per_step > kMaxHeadsPerStep) {
    core::refuse(ErrorCode::InvalidArgument, "policy.heads_per_step", std::to_string(policy.heads_per_step),
                 "1 to " + std::to_string(kMaxHeadsPerStep));
  }
  // Pairs of K's dims; of V's tokens too where that costs the output nothing it had: its own rounding is as coarse.
  const bool can_pair_dot = target.has_pair_dot && p.q_dtype == DType::bf16 && p.k_format == KvFormat::bf16;
  const bool can_pair_values = can_pair_dot && p.v_format == KvFormat::bf16;
  // Off on Sapphire Rapids: 11.3 GB/s against 14.1 converted (8 rows, d128), 9.7 against 11.7 (d64), L2-resident, one thread.
  // On for AMD: Zen 4, one thread from memory, 13.3 GB/s against 10.2 (8 rows, d128), 11.8 against 8.9 (d64), but one row
  // 17.2 against 20.2, which is K row by row. Not measured on Arm.
  if (policy.pair_dot < 0) {
    const bool is_fast = can_pair_dot && data.device.fast_pair_dot && !one_row_in_order;
    policy.pair_dot = !is_fast ? 0 : can_pair_values && p.out_dtype == DType::bf16 ? 2 : 1;
  }
  const int most_pairs = can_pair_values ? 2 : can_pair_dot ? 1 : 0;
  if (policy.pair_dot > most_pairs) {
    core::refuse(ErrorCode::InvalidArgument, "policy.pair_dot", std::to_string(policy.pair_dot),
                 most_pairs == 2   ? "0, 1 or 2"
                 : most_pairs == 1 ? "0 or 1, as V is not bf16"
                                   : "0 unless q and K are bf16 and the target is avx512_bf16 or neon_bf16");
  }
  if (policy.prefetch_tokens > 65536) {
    core::refuse(ErrorCode::InvalidArgument, "policy.prefetch_tokens", std::to_string(policy.prefetch_tokens),
                 "0 to 65536");
  }
}

/// Adds `count * size` bytes to the layout at a 64-byte boundary and returns where they start.
class WorkspaceBuilder {
 public:
  std::size_t add(std::int64_t count, std::int64_t size) {
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(count, size, &bytes) || __builtin_add_overflow(bytes, 63 + end_, &bytes) ||
        bytes > (1LL << 62)) {
      too_large();
    }
    const std::int64_t begin = end_;
    end_ = bytes / 64 * 64;
    return static_cast<std::size_t>(begin);
  }
  [[nodiscard]] std::size_t total() const { return static_cast<std::size_t>(end_ + 63); }

  static std::int64_t product(std::int64_t a, std::int64_t b) {
    std::int64_t result = 0;
    if (__builtin_mul_overflow(a, b, &result)) too_large();
    return result;
  }

 private:
  [[noreturn]] static void too_large() {
    core::refuse(ErrorCode::InvalidArgument, "workspace", "more than 2^62 bytes",
                 "fewer sequences, heads or max_kv_len, or larger chunk_tokens");
  }
  std::int64_t end_ = 0;
};

void lay_out_workspace(core::PlanData& data) {
  const Problem& p = data.problem;
  core::WorkspaceLayout& w = data.workspace;
  if (p.num_seqs == 0 || p.q_len == 0) return;  // nothing to run: no workspace
  WorkspaceBuilder builder;
  const std::int64_t streams = p.num_seqs * p.num_kv_heads;
  const std::int64_t rows = WorkspaceBuilder::product(streams, data.rows_per_stream);
  const std::int64_t partials = WorkspaceBuilder::product(rows, data.max_chunks);
  w.item_starts = builder.add(p.num_seqs + 1, 8);
  w.runs = builder.add(data.device.num_threads, 64);
  w.counters = builder.add(WorkspaceBuilder::product(streams, data.row_blocks), 4);
  w.partial_lse = builder.add(partials, 4);
  w.partial_o = builder.add(WorkspaceBuilder::product(partials, round_up(p.head_dim_v, kPadFloats)), 4);
  const std::int64_t block_rows = std::min(data.rows_per_stream, data.policy.rows_per_worker);
  w.scratch_bytes = static_cast<std::size_t>(
      round_up(4 * scratch_floats(block_rows, p.head_dim_qk, p.head_dim_v, data.policy.step_tokens, data.steps_per_turn,
                                  num_groups(p.k_format, p.head_dim_qk, p.quant_group),
                                  num_groups(p.v_format, p.head_dim_v, p.quant_group)),
               64));
  w.scratch =
      builder.add(data.device.num_threads * data.policy.heads_per_step, static_cast<std::int64_t>(w.scratch_bytes));
  w.total_bytes = builder.total();
}

std::string kernel_id(const Problem& p, const Target& target, std::int64_t row_tile) {
  std::string format(to_string(p.k_format));
  if (p.v_format != p.k_format) format = "k" + format + "_v" + std::string(to_string(p.v_format));
  const bool listed = std::any_of(std::begin(kHeadDims), std::end(kHeadDims),
                                  [&p](const Dims& d) { return d.qk == p.head_dim_qk && d.v == p.head_dim_v; });
  const std::string dims = listed ? "d" + std::to_string(p.head_dim_qk) + "x" + std::to_string(p.head_dim_v) : "dany";
  return "attend_" + std::string(target.name) + "_" + format + "_" + dims + "_r" + std::to_string(row_tile);
}

}  // namespace

void plan(core::PlanData& data, const PlanOptions& options) {
  const Target* target = find_target(data.device.target);
  if (target == nullptr) {
    throw Error(ErrorCode::Unavailable,
                "device.target: got '" + data.device.target + "', which this build does not have");
  }
  const Problem& p = data.problem;
  core::require_listed_formats(p, Backend::cpu, true);
  core::require_plain_layout(p, Backend::cpu);
  core::require_served(!options.earlier_kv_ready, Backend::cpu, "earlier_kv_ready",
                       "leave it false: the cpu backend has no launch order to relax");
  decide_policy(data, *target, options.policy);
  data.reads_parts = choose_reads_parts(p, data.policy, *target);
  data.steps_per_turn = choose_steps_per_turn(p, data.policy, data.reads_parts);
  data.row_blocks = std::max<std::int64_t>(1, shared::ceil_div(data.rows_per_stream, data.policy.rows_per_worker));
  data.max_chunks = std::max<std::int64_t>(1, shared::ceil_div(p.max_kv_len, data.policy.chunk_tokens));
  if (p.window > 0) {
    // The rows together see at most window + q_len - 1 keys, which touch one chunk more than they fill.
    const std::int64_t seen = p.window + p.q_len - 1;
    data.max_chunks = std::min(data.max_chunks, shared::ceil_div(seen, data.policy.chunk_tokens) + 1);
  }
  // A tile never has more rows than there are.
  const std::int64_t block_rows = shared::ceil_div(std::max<std::int64_t>(1, data.rows_per_stream), data.row_blocks);
  const std::int64_t tiles = shared::ceil_div(block_rows, data.policy.row_tile);
  data.kernel_id = kernel_id(p, *target, shared::ceil_div(block_rows, tiles));
  for (const char* name : kTargetNames) {
    if (name != data.device.target) {
      data.rejected.push_back("attend_" + std::string(name) + "_*: the device given is target " + data.device.target);
    }
  }
  lay_out_workspace(data);
}

}  // namespace kvonce::cpu
