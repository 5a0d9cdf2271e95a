// What the CUDA backend serves and how: refusals, kernels, splits, joins, workspace. Integers only.
#include <algorithm>
#include <optional>
#include <string>

#include "core/refuse.hpp"
#include "core/served.hpp"
#include "cuda/backend.hpp"
#include "cuda/cuda_plan.hpp"
#include "shared/token_range.h"

namespace kvonce::cuda {
namespace {

constexpr std::int64_t kTile = 16;  // tokens a warp takes at a time

struct Dims {
  std::int64_t qk;
  std::int64_t v;
};

// The tensor-core kernel's head dims: those of the list whose rows a block's registers hold.
constexpr Dims kMmaDims[] = {
#define KVONCE_CUDA_DIMS(qk, v) {qk, v},
#include "cuda/instances.def"
};

void require(bool served, const std::string& what, const std::string& instead) {
  core::require_served(served, Backend::cuda, what, instead);
}

void require_dims_and_length(const Problem& p) {
  require(p.head_dim_qk % 8 == 0, "head_dim_qk " + std::to_string(p.head_dim_qk), "pad it to a multiple of 8");
  require(p.head_dim_v % 8 == 0, "head_dim_v " + std::to_string(p.head_dim_v), "pad it to a multiple of 8");
  // Token numbers of a tile past the end stay within 32 bits.
  constexpr std::int64_t kMaxTokens = 2147483647 - 65536;
  require(p.max_kv_len <= kMaxTokens, "max_kv_len " + std::to_string(p.max_kv_len),
          "split the cache into parts of up to " + std::to_string(kMaxTokens) + " tokens and merge");
}

void require_policy(const Policy& policy) {
  const auto field = [](const char* name, std::int64_t value, bool fits, const char* allowed) {
    if (!fits) core::refuse(ErrorCode::InvalidArgument, name, std::to_string(value), allowed);
  };
  field("policy.rows_per_worker", policy.rows_per_worker,
        policy.rows_per_worker == 0 || policy.rows_per_worker == policy.row_tile,
        "0 or the same as row_tile on the cuda backend: a block takes one row tile");
  field("policy.chunk_tokens", policy.chunk_tokens,
        policy.chunk_tokens >= 0 && policy.chunk_tokens % kTile == 0 && policy.chunk_tokens <= (1 << 30),
        "0 (choose) or a multiple of 16 up to 2^30 on the cuda backend");
  field("policy.step_tokens", policy.step_tokens, policy.step_tokens == 0 || policy.step_tokens == kTile,
        "0 (choose) or 16 on the cuda backend");
  field("policy.prefetch_tokens", policy.prefetch_tokens, policy.prefetch_tokens == -1, "-1 on the cuda backend");
  field("policy.prefetch_lines", policy.prefetch_lines, policy.prefetch_lines == 0, "0 on the cuda backend");
  field("policy.prefetch_level", policy.prefetch_level, policy.prefetch_level == 0, "0 on the cuda backend");
  field("policy.pair_dot", policy.pair_dot, policy.pair_dot == -1, "-1 on the cuda backend");
  field("policy.worker_bytes", policy.worker_bytes, policy.worker_bytes == 0, "0 on the cuda backend");
  field("policy.body", policy.body, policy.body == 0, "0 on the cuda backend");
  field("policy.simdgroups", policy.simdgroups, policy.simdgroups == 0, "0 on the cuda backend");
  field("policy.splits", policy.splits, policy.splits >= 0 && policy.splits <= 65535, "0 (choose) to 65535");
  field("policy.cluster", policy.cluster, policy.cluster >= -1 && policy.cluster <= 1, "-1 (choose), 0 or 1");
  field("policy.join_blocks", policy.join_blocks, policy.join_blocks >= 0 && policy.join_blocks <= 1024,
        "0 (choose) to 1024");
}

bool has_mma(const Problem& p) {
  const bool same = static_cast<int>(p.q_dtype) == static_cast<int>(p.k_format) && p.k_format == p.v_format;
  return same && p.k_format != KvFormat::f32 &&
         std::any_of(std::begin(kMmaDims), std::end(kMmaDims),
                     [&p](const Dims& d) { return d.qk == p.head_dim_qk && d.v == p.head_dim_v; });
}

std::int64_t sms_of(const Device& device) { return device.num_sms > 0 ? device.num_sms : 132; }

bool has_clusters(const Device& device) {
  // "sm_90", "sm_100", ...: clusters exist from 9.0 on.
  return device.target.size() > 4 && (device.target.size() > 5 || device.target[3] >= '9');
}

/// Blocks of a cluster: 8 everywhere, 16 where it has been tried.
std::int64_t cluster_limit(const Device& device) { return device.target == "sm_90" ? 16 : 8; }

/// As many splits as fill the device once, but no more than give every warp of a block as many tiles: 64 blocks a head
/// instead of 66 at 16q/2kv d128, 8,192 tokens, take 8.3 us instead of 9.2 (H200). Where there are more streams than
/// multiprocessors, the number that leaves the fewest of them idle in the last round.
std::int64_t choose_splits(std::int64_t streams, std::int64_t sms, std::int64_t max_tiles) {
  const std::int64_t most = std::max<std::int64_t>(1, max_tiles);
  if (streams <= sms) {
    const std::int64_t fill = std::clamp<std::int64_t>(sms / std::max<std::int64_t>(1, streams), 1, most);
    const std::int64_t rounds = shared::ceil_div(shared::ceil_div(most, fill), kWarps);
    const std::int64_t splits = shared::ceil_div(most, rounds * kWarps);
    // A joining block takes the partials of 64 splits at once. 65 and 64 of them at 16q/2kv d128, 32,768 of 32,832 tokens, after
    // weights of 64 MB: 15.5 and 14.9 us (H200).
    constexpr std::int64_t kJoinAtOnce = 64;
    const std::int64_t rest = splits % kJoinAtOnce;
    return splits > kJoinAtOnce && rest <= 4 ? splits - rest : splits;
  }
  std::int64_t best = 1;
  double best_cost = 0.0;
  for (std::int64_t splits = 1; splits <= std::min<std::int64_t>(8, most); ++splits) {
    const std::int64_t blocks = streams * splits;
    const double rounds = static_cast<double>(shared::ceil_div(blocks, sms) * sms) / static_cast<double>(blocks);
    const double cost = rounds * (1.0 + 0.02 * static_cast<double>(splits - 1));
    if (splits == 1 || cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return best;
}

/// What follows from the numbers of rows, splits and joining blocks.
void finish_shape(KernelShape& s, const Problem& p, bool tensor_cores) {
  const auto elements = static_cast<std::int32_t>(s.rows_per_block * p.head_dim_v / 4);
  const auto row_elements = static_cast<std::int32_t>(p.head_dim_v / 4);
  s.splits_magic = divide_magic(s.num_splits);
  s.place_rows = s.rows_per_block;
  // Not with splits of a given size: the order of adding would depend on how many the longest sequence has.
  if (tensor_cores && s.split_tokens == 0 && s.join == kJoinWorkspace && s.num_splits > 1 &&
      s.num_splits <= kFewSplits && slices_of(elements) > std::min(s.join_blocks, s.num_splits)) {
    s.join = kJoinFew;
  }
  s.slice_rows =
      row_elements % kSlice == 0 ? 1 : std::min(s.rows_per_block, (kSlice + row_elements - 2) / row_elements + 1);
  s.own_slices = (slices_of(elements) + s.num_splits - 1) / s.num_splits;
  const auto tiles = static_cast<std::int32_t>(shared::ceil_div(p.max_kv_len, kTile));
  const bool all = s.join == kJoinCluster || tiles / s.num_splits >= kMinTiles;
  s.share_splits = all ? s.num_splits : std::max(1, (tiles + kMinTiles - 1) / kMinTiles);
  s.share_tiles = tiles / s.share_splits;
  s.share_rest = tiles % s.share_splits;
}

KernelShape shape_for(const Problem& p, const Device& device, const Policy& policy, std::int64_t rows,
                      std::int64_t rows_per_block, bool tensor_cores) {
  KernelShape s;
  s.exists = true;
  rows_per_block = std::clamp<std::int64_t>(rows_per_block, 1, std::max<std::int64_t>(1, rows));
  s.rows_per_block = static_cast<std::int32_t>(rows_per_block);
  s.row_blocks = static_cast<std::int32_t>(std::max<std::int64_t>(1, shared::ceil_div(rows, rows_per_block)));
  require(p.num_kv_heads * s.row_blocks <= 65535,
          "num_kv_heads times row blocks " + std::to_string(p.num_kv_heads * s.row_blocks),
          "run up to 65535 at a time");
  const std::int64_t streams = std::max<std::int64_t>(1, p.num_seqs * p.num_kv_heads * s.row_blocks);
  const std::int64_t sms = sms_of(device);
  const std::int64_t max_tiles = shared::ceil_div(p.max_kv_len, kTile);
  if (policy.chunk_tokens > 0) {
    s.split_tokens = static_cast<std::int32_t>(policy.chunk_tokens);
    s.num_splits =
        static_cast<std::int32_t>(std::max<std::int64_t>(1, shared::ceil_div(p.max_kv_len, policy.chunk_tokens)));
  } else {
    // A cluster's join is the cheaper one, but 64 blocks do not saturate the memory, and clusters of 16 find few places.
    // H200, cluster and workspace: 64q/8kv d64 2,048 tokens (64 KB a block) 5.4 and 6.5 us, 32q/8kv d128 2,048 tokens (128 KB)
    // 7.1 and 7.7, 32q/4kv d128 8,192 tokens (256 KB) 10.4 and 10.6, 32q/8kv 8,192 tokens (512 KB) 15.1 and 13.9.
    constexpr std::int64_t kClusterBlocks = 64;
    constexpr std::int64_t kClusterBlockBytes = 160 * 1024;
    std::int64_t cluster = 1;
    const std::int64_t most = cluster_limit(device);
    while (2 * cluster <= most && 2 * cluster * streams <= std::min(kClusterBlocks, sms) &&
           2 * cluster * kMinTiles <= max_tiles) {
      cluster *= 2;
    }
    const bool fits = tensor_cores && has_clusters(device) && cluster > 1;
    const bool wanted = policy.cluster == 1 ||
                        (policy.cluster == -1 && core::max_kv_bytes(p) / (cluster * streams) <= kClusterBlockBytes);
    if (fits && wanted) {
      s.join = kJoinCluster;
      s.num_splits =
          static_cast<std::int32_t>(policy.splits > 0 ? std::min<std::int64_t>(policy.splits, most) : cluster);
      if (s.num_splits == 1) s.join = kJoinWorkspace;  // nothing to join
    } else {
      s.num_splits =
          static_cast<std::int32_t>(policy.splits > 0 ? policy.splits : choose_splits(streams, sms, max_tiles));
    }
  }
  if (static_cast<std::int64_t>(s.num_splits) * rows_per_block * p.head_dim_v >= (1LL << 31)) {
    core::refuse(ErrorCode::InvalidArgument, "chunk_tokens", std::to_string(policy.chunk_tokens),
                 "larger values: a KV stream's partials must stay below 2^31 numbers");
  }
  const std::int64_t join_blocks =
      policy.join_blocks > 0 ? policy.join_blocks : shared::ceil_div(rows_per_block * p.head_dim_v / 4, kSlice);
  s.join_blocks =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(join_blocks, 1, std::min(s.num_splits, kMaxJoiners)));
  finish_shape(s, p, tensor_cores);
  return s;
}

MmaInstance general_instance(Join join, const Problem& p, const Device& device, std::int64_t row_tiles) {
  MmaInstance instance;
  instance.join = join;
  instance.head_dim_qk = static_cast<int>(p.head_dim_qk);
  instance.head_dim_v = static_cast<int>(p.head_dim_v);
  instance.row_tiles = static_cast<int>(row_tiles);
  instance.step_tiles = step_tiles(instance.head_dim_qk);
  instance.warps = mma_warps(instance.head_dim_qk, instance.head_dim_v);
  if (is_staged(instance.head_dim_qk, instance.head_dim_v)) {
    instance.kv_bytes = instance.warps * stage_bytes(instance.head_dim_qk, instance.head_dim_v, instance.step_tiles);
  }
  if (device.target == "sm_90" && has_groups(instance.head_dim_qk, instance.head_dim_v, instance.row_tiles)) {
    instance.groups = true;
    instance.kv_bytes = group_bytes(instance.head_dim_qk, static_cast<int>(kMmaRows) * instance.row_tiles);
  }
  return instance;
}

/// Row tiles that a block of the tensor-core kernel takes at most: those whose K, V and partials have room in its shared
/// memory, where that is known. 0: not even one.
std::int64_t most_mma_tiles(const Problem& p, const Device& device) {
  constexpr std::int64_t kOther = 12 * 1024;  // q, the system's part
  const auto fits = [&](int tiles) {
    const MmaInstance instance = general_instance(kJoinWorkspace, p, device, tiles);
    const std::int64_t bytes = merge_shared_bytes(
        LaunchShape(), instance.partials(), static_cast<int>(kMmaRows) * tiles, instance.head_dim_v, instance.kv_bytes);
    return device.l1_bytes == 0 || bytes + kOther <= device.l1_bytes;
  };
  const auto dim_qk = static_cast<int>(p.head_dim_qk);
  const auto dim_v = static_cast<int>(p.head_dim_v);
  if (is_staged(dim_qk, dim_v) && !has_clusters(device)) return 0;  // nor bulk copies
  int tiles = device.target == "sm_90" && has_groups(dim_qk, dim_v, 8) ? 8 : most_row_tiles(dim_qk, dim_v);
  while (tiles > 0 && !fits(tiles)) tiles /= 2;
  return tiles;
}

/// The instance for plain decode where there is one (Known in partial.cuh).
std::optional<MmaInstance> choose_plain(const KernelShape& s, const MmaInstance& general, const Problem& p,
                                        std::int64_t rows) {
  if (p.q_len != 1 || p.window != 0 || p.has_sinks || s.split_tokens != 0 || rows > kPlainRows ||
      static_cast<int>(p.out_dtype) != static_cast<int>(p.k_format) ||
      !has_plain(static_cast<int>(p.head_dim_qk), static_cast<int>(p.head_dim_v))) {
    return std::nullopt;
  }
  MmaInstance plain = general;
  plain.plain = true;
  // A body without a loop where every warp has one step at most, at this length and at shorter ones: kMinTiles fit always.
  static_assert(kMinTiles <= 4 * 2);
  const std::int32_t tiles = s.share_tiles + (s.share_rest > 0 ? 1 : 0);
  const auto one_step = [&](int warps, int step) {
    if (s.join == kJoinFew || plain.one_step || tiles > warps * step) return;
    plain.one_step = true;
    plain.warps = warps;
    plain.step_tiles = step;
  };
  one_step(4, 2);
  one_step(kWarps, 2);
  if (p.head_dim_qk == 64) one_step(kWarps, 4);
  return plain;
}

class Layout {
 public:
  std::size_t add(std::int64_t a, std::int64_t b, std::int64_t size) {
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(a, b, &bytes) || __builtin_mul_overflow(bytes, size, &bytes) ||
        __builtin_add_overflow(bytes, 255 + end_, &bytes) || bytes > (1LL << 62)) {
      core::refuse(ErrorCode::InvalidArgument, "workspace", "more than 2^62 bytes",
                   "fewer sequences, heads or max_kv_len, or larger chunk_tokens");
    }
    const std::int64_t begin = end_;
    end_ = bytes / 256 * 256;
    return static_cast<std::size_t>(begin);
  }
  [[nodiscard]] std::size_t end() const { return static_cast<std::size_t>(end_); }

 private:
  std::int64_t end_ = kHeaderWords * 4;
};

void lay_out_workspace(core::PlanData& data, CudaPlan& plan) {
  const Problem& p = data.problem;
  if (p.num_seqs == 0 || p.q_len == 0) return;
  const auto streams = [&p](const KernelShape& s) { return p.num_seqs * p.num_kv_heads * s.row_blocks; };
  // The kernels of a plan share the workspace: each part is as large as the one that needs more.
  std::int64_t tickets = 0;
  std::int64_t ml = 0;
  std::int64_t o = 0;
  for (const KernelShape* s : {&plan.mma, &plan.generic}) {
    if (!s->exists || s->join == kJoinCluster || s->num_splits == 1) continue;
    const std::int64_t slices = slices_of(static_cast<std::int32_t>(s->place_rows * p.head_dim_v / 4));
    Layout probe;  // refuses what overflows
    (void)probe.add(streams(*s), s->num_splits * s->place_rows, p.head_dim_v * 4);
    (void)probe.add(streams(*s) * slices, s->num_splits * s->slice_rows, 8);
    tickets = std::max(tickets, streams(*s));
    ml = std::max(ml, streams(*s) * slices * s->num_splits * s->slice_rows);
    o = std::max(o, streams(*s) * s->num_splits * s->place_rows * p.head_dim_v);
  }
  Layout layout;
  plan.tickets = layout.add(tickets, 1, 8);
  plan.partial_ml = layout.add(ml, 1, 8);
  plan.partial_o = layout.add(o, 1, 4);
  plan.end = layout.end();
  data.workspace.total_bytes = plan.end + 255;  // room to align the base
}

std::string format_name(const Problem& p) {
  std::string name(to_string(p.k_format));
  if (p.v_format != p.k_format) name = "k" + name + "_v" + std::string(to_string(p.v_format));
  return name;
}

}  // namespace

void plan(core::PlanData& data, const PlanOptions& options) {
  const Problem& p = data.problem;
  if (data.device.target.rfind("sm_", 0) != 0) {
    core::refuse(ErrorCode::Unavailable, "device.target", "'" + data.device.target + "'",
                 "the sm_NN of a backend cuda device, as cuda_device() gives it");
  }
  core::require_listed_formats(p, Backend::cuda, false);
  core::require_plain_layout(p, Backend::cuda);
  core::require_plain_scores(p, Backend::cuda);
  require_dims_and_length(p);
  require_policy(options.policy);
  auto plan = std::make_shared<CudaPlan>();
  data.earlier_kv_ready = options.earlier_kv_ready;
  const std::int64_t rows = data.rows_per_stream;
  const std::int64_t largest_dim = std::max(p.head_dim_qk, p.head_dim_v);
  const std::string prefix = "attend_" + data.device.target + "_" + format_name(p) + "_";
  std::int64_t generic_rows = 8;  // 8 rows of up to 128 dims, 4 of 256, 2 of 512, 1 of 1024
  for (std::int64_t dim = 128; dim < largest_dim; dim *= 2) generic_rows /= 2;
  std::int64_t tile = generic_rows;
  const std::int64_t most_tiles = has_mma(p) ? most_mma_tiles(p, data.device) : 0;
  if (most_tiles > 0) {
    const std::int64_t most = kMmaRows * most_tiles;
    tile = kMmaRows;
    while (tile < most && tile < rows) tile *= 2;
    if (options.policy.row_tile > 0) tile = options.policy.row_tile;
    if (tile > most || (tile != kMmaRows && tile != 2 * kMmaRows && tile != 4 * kMmaRows && tile != 8 * kMmaRows)) {
      core::refuse(ErrorCode::InvalidArgument, "policy.row_tile", std::to_string(tile),
                   most == 8 * kMmaRows   ? "0 (choose), 8, 16, 32 or 64"
                   : most == 4 * kMmaRows ? "0 (choose), 8, 16 or 32 for these head dims"
                   : most == 2 * kMmaRows ? "0 (choose), 8 or 16 for these head dims"
                                          : "0 (choose) or 8 for these head dims");
    }
    plan->mma = shape_for(p, data.device, options.policy, rows, tile, true);
    plan->instance = general_instance(plan->mma.join, p, data.device, tile / kMmaRows);
    plan->plain = choose_plain(plan->mma, plan->instance, p, rows);
    if (plan->plain) plan->mma.place_rows = kPlainRows;
  } else {
    if (options.policy.row_tile > 0 && options.policy.row_tile != tile) {
      core::refuse(ErrorCode::InvalidArgument, "policy.row_tile", std::to_string(options.policy.row_tile),
                   "0 (choose) or " + std::to_string(tile) + ", the generic kernel's for these head dims");
    }
    std::string dims;
    for (const Dims& d : kMmaDims) dims += " " + std::to_string(d.qk) + (d.v != d.qk ? "x" + std::to_string(d.v) : "");
    data.rejected.push_back(prefix + "mma: serves q, K and V of one 16-bit type, head dims" + dims +
                            (has_mma(p) ? ", these not on this device" : ""));
  }
  plan->generic = shape_for(p, data.device, options.policy, rows, generic_rows, false);

  const KernelShape& chosen = plan->mma.exists ? plan->mma : plan->generic;
  data.kernel_id =
      prefix + (plan->mma.exists ? "d" + std::to_string(p.head_dim_qk) + "x" + std::to_string(p.head_dim_v) + "_r" +
                                       std::to_string(tile) + (plan->plain ? "_plain" : "")
                                 : "dany_r" + std::to_string(tile));
  data.row_blocks = chosen.row_blocks;
  data.max_chunks = chosen.num_splits;
  Policy& policy = data.policy;
  policy = Policy();
  policy.row_tile = tile;
  policy.rows_per_worker = tile;
  policy.chunk_tokens =
      chosen.split_tokens > 0
          ? chosen.split_tokens
          : std::max<std::int64_t>(kTile,
                                   shared::ceil_div(shared::ceil_div(p.max_kv_len, kTile), chosen.num_splits) * kTile);
  policy.step_tokens = kTile;
  policy.splits = chosen.num_splits;
  policy.cluster = chosen.join == kJoinCluster ? 1 : 0;
  policy.join_blocks = chosen.join_blocks;
  lay_out_workspace(data, *plan);
  data.backend_plan = std::move(plan);
}

}  // namespace kvonce::cuda
