#include "metal/policy.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <optional>
#include <utility>

#include "core/refuse.hpp"
#include "core/served.hpp"
#include "metal/params.h"
#include "shared/token_range.h"

namespace kvonce::metal {
namespace {

using kvonce_metal::kLanes;
using shared::ceil_div;

// None of these numbers is measured: there was no Apple GPU. Each says what it is derived from.

/// Threads of a threadgroup where the pipelines' limit is unknown. A dispatch over the limit is dropped without an error; public
/// reports name pipelines limited to 832, 896 and, the least, 256 threads (ml-explore/mlx#4349, Blaizzy/mlx-vlm#1799,
/// ml-explore/mlx-swift#132).
constexpr std::int64_t kSafeThreads = 256;
constexpr std::int64_t kMostThreads = 1024;
constexpr std::int64_t kLeastSharedBytes = 16384;  // what merge_partials may take
static_assert(4 * kvonce_metal::merge_shared_floats(kvonce_metal::kMaxMergeSimdgroups, kvonce_metal::kMaxHeadDim) <=
              kLeastSharedBytes);

/// A thread addresses 256 16-bit registers, 128 floats (philipturner/metal-benchmarks); a quarter is left to addresses and loops.
constexpr std::int64_t kMaxLiveFloats = 96;
/// A core's registers, and the simdgroups that hide its latencies (the same source: 208 KB, 24). Fewer count as slower in proportion.
constexpr std::int64_t kRegisterBytes = 208 * 1024;
constexpr std::int64_t kWantedSimdgroups = 24;
/// So many rounds of 24 simdgroups per core: the last, partly filled one then costs a quarter at most. Where that leaves
/// partials heavier than 1/16 of the streamed bytes, fewer; for the first round, 1/4 is accepted.
constexpr std::int64_t kWaves = 4;
constexpr std::int64_t kPartialWeight = 16;
constexpr std::int64_t kMostPartialWeight = 4;
constexpr std::int64_t kUnknownCores = 40;  // a Max; on smaller GPUs it means more rounds
constexpr std::int64_t kMaxChunks = 65535;
/// Simdgroups that share a chunk's tokens and leave one partial: kSafeThreads of them.
constexpr std::int64_t kTokenParts = 8;
constexpr std::int64_t kBarrierSlots = 40;   // of a stage's threadgroup barriers, a guess
constexpr std::int64_t kPartialScalars = 2;  // floats of a partial beside o, metal/params.h
/// MLX's `grid` counts threads in an int.
constexpr std::int64_t kMaxGrid = 2147483647;

/// t0 + max(bytes / rate, pairs * slots / slot rate), least squares over the seed's twelve points (ml-explore/mlx#4076, M5 Pro,
/// the per_head body; rms 6.8 %, worst 16 %). 18 cores: M5 Pros have 16 or 20, and an M5 Max's 40 do 0.19e9 pairs/s each.
constexpr double kFitStartUs = 11.14;
constexpr double kFitGbps = 283.5;
constexpr double kFitSlotsPerUs = 157500.0;
constexpr double kFitCores = 18.0;

struct Shape {
  std::int64_t rows;
  std::int64_t dim_qk;
  std::int64_t dim_v;
  std::int64_t q_bytes;       // of an element of q
  std::int64_t staged_bytes;  // of an element of K and V in threadgroup memory
  std::int64_t token_bytes;   // of a token's K and V of one head
  bool affine;                // K and V are of one of MLX's quantised formats
};

bool is_affine(KvFormat format) { return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4; }

Shape shape_of(const Problem& p) {
  Shape s{};
  s.rows = std::max<std::int64_t>(1, p.rows_per_stream());
  s.dim_qk = p.head_dim_qk;
  s.dim_v = p.head_dim_v;
  s.q_bytes = p.q_dtype == DType::f32 ? 4 : 2;
  s.affine = is_affine(p.k_format);
  s.staged_bytes = s.affine ? 4 : s.q_bytes;
  const std::int64_t dims = s.dim_qk + s.dim_v;
  s.token_bytes = dims * s.q_bytes;
  if (s.affine) {  // codes, and a scale and a bias of q's type per group
    s.token_bytes = dims / (p.k_format == KvFormat::mlx_int8 ? 1 : 2) + 2 * s.q_bytes * (dims / p.quant_group);
  }
  return s;
}

struct Candidate {
  Body body = Body::vector;
  std::int64_t row_tile = 1;
  std::string name;
  std::int64_t row_tiles = 1;
  std::int64_t token_parts = 1;
  std::int64_t row_blocks = 1;
  std::int64_t live_floats = 0;
  std::int64_t slots = 0;
  std::int64_t cost = 0;  // slots of all rows with padding, weighed
  std::int64_t shared_bytes = 4;
  std::string refusal;  // empty: possible
};

std::int64_t lanes_of(std::int64_t dim) { return ceil_div(dim, kLanes); }

std::int64_t shared_bytes(Body body, std::int64_t row_tile, const Shape& s, std::int64_t row_tiles,
                          std::int64_t token_parts) {
  return 4LL * kvonce_metal::shared_floats(body == Body::matrix, static_cast<int>(row_tile), static_cast<int>(s.dim_qk),
                                           static_cast<int>(s.dim_v), static_cast<int>(s.staged_bytes),
                                           static_cast<int>(row_tiles), static_cast<int>(token_parts));
}

std::int64_t live_floats_of(Body body, std::int64_t row_tile, const Shape& s) {
  const std::int64_t affine = s.affine ? 8 : 0;  // scales, biases, codes
  if (body == Body::matrix) {  // o and scores of two 8x8 matrices in float, q in its own type, operands
    return 2 * ceil_div(s.dim_v, 8) + ceil_div(ceil_div(s.dim_qk, 8) * s.q_bytes, 2) + 20 + affine;
  }
  const std::int64_t scores = body == Body::per_head ? 0 : 32;
  const std::int64_t qk = lanes_of(s.dim_qk);
  const std::int64_t v = lanes_of(s.dim_v);
  return row_tile * (ceil_div(qk * s.q_bytes, 4) + v) + scores + std::max(qk, v) + 8 + affine;  // q as stored
}

/// Issue slots of a simdgroup per 64 (row, token) pairs of full row tiles: instructions counted, each with its cost on Apple7 and
/// 8 (metal-benchmarks: a shuffle 2, an exponential 5, simd_sum 14.5, an 8x8x8 product 17.5).
std::int64_t slots_of(Body body, std::int64_t row_tile, std::int64_t row_tiles, const Shape& s) {
  const std::int64_t qk = lanes_of(s.dim_qk);
  const std::int64_t v = lanes_of(s.dim_v);
  if (body == Body::per_head) return 64 * (qk + 2 * v + 38);
  std::int64_t slots = 0;
  if (body == Body::matrix) {
    slots = 35 * (ceil_div(s.dim_qk, 8) + ceil_div(s.dim_v, 8)) / 2 + 46 + (s.dim_qk + s.dim_v) / 8;
  } else {
    const std::int64_t tokens =
        kLanes / row_tile;  // loads, products, butterfly, maximum, exponentials, rescale, weights
    const auto log2_tokens = static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(tokens))) - 1;
    slots = 2 * (tokens * (qk + v) + 32 * (qk + v) + 124 + 3 * log2_tokens + 15 + row_tile * (2 + v) + 64 + 11);
  }
  // A code takes two instructions more than an element: out of its word, and scale * code + bias.
  if (s.affine) slots += body == Body::matrix ? (s.dim_qk + s.dim_v) / 4 : 4 * (kLanes / row_tile) * (qk + v);
  if (row_tiles > 1) {
    const bool matrix = body == Body::matrix;
    const int tile = static_cast<int>(row_tile);
    const int dims[] = {static_cast<int>(s.dim_qk), static_cast<int>(s.dim_v)};
    const int element = static_cast<int>(s.staged_bytes);
    const std::int64_t piece = kvonce_metal::piece_tokens(matrix, tile, dims[0], dims[1], element);
    const std::int64_t staged = piece > 0 ? kvonce_metal::step_tokens(matrix, tile)
                                          : kvonce_metal::stage_tokens(matrix, tile, dims[0], dims[1], element);
    const std::int64_t stages = piece > 0 ? 2 * staged / piece : 1;
    slots += 64 * (staged * (qk + v) / row_tiles + stages * kBarrierSlots) / (row_tile * staged);
  }
  return slots;
}

Candidate consider(Body body, std::int64_t row_tile, const Shape& s, const Capabilities& gpu, const Policy& asked) {
  Candidate c;
  c.body = body;
  c.row_tile = row_tile;
  c.live_floats = live_floats_of(body, row_tile, s);
  if (body == Body::matrix && (s.dim_qk % 16 != 0 || s.dim_v % 16 != 0)) {
    c.refusal = "head dims must be multiples of 16";
    return c;
  }
  if (body == Body::per_head && s.affine) {
    c.refusal = "the baseline serves no quantised caches";
    return c;
  }
  if (c.live_floats > kMaxLiveFloats) {
    c.refusal = std::to_string(c.live_floats) + " floats a lane, at most " + std::to_string(kMaxLiveFloats) +
                " stay in registers";
    return c;
  }
  const std::int64_t most_simdgroups = gpu.max_threads / kLanes;
  const std::int64_t tiles = ceil_div(s.rows, row_tile);
  if (body == Body::per_head) {
    c.row_tiles = std::min({tiles, asked.simdgroups > 0 ? asked.simdgroups : most_simdgroups, std::int64_t{32}});
    c.row_blocks = ceil_div(tiles, c.row_tiles);
    c.slots = slots_of(body, 1, 1, s);
    c.cost = c.slots * s.rows;
    return c;
  }
  std::int64_t most_tiles = std::min({tiles, most_simdgroups, std::int64_t{kvonce_metal::kMaxRowTiles}});
  if (asked.rows_per_worker > 0) {
    most_tiles = std::min(most_tiles, std::max<std::int64_t>(1, asked.rows_per_worker / row_tile));
  }
  if (shared_bytes(body, row_tile, s, 2, 1) > gpu.threadgroup_bytes) most_tiles = 1;
  c.row_tiles = ceil_div(tiles, ceil_div(tiles, most_tiles));
  c.row_blocks = ceil_div(tiles, c.row_tiles);
  if (c.row_tiles == 1) {
    const std::int64_t wanted = std::min({asked.simdgroups > 0 ? asked.simdgroups : kTokenParts, most_simdgroups,
                                          std::int64_t{kvonce_metal::kMaxTokenParts}});
    while (2 * c.token_parts <= wanted && 2 * c.token_parts * s.dim_v <= kvonce_metal::kJoinFloats &&
           shared_bytes(body, row_tile, s, 1, 2 * c.token_parts) <= gpu.threadgroup_bytes) {
      c.token_parts *= 2;
    }
  }
  c.shared_bytes = shared_bytes(body, row_tile, s, c.row_tiles, c.token_parts);
  c.slots = slots_of(body, row_tile, c.row_tiles, s);
  const std::int64_t resident = std::min(kWantedSimdgroups, kRegisterBytes / (4 * kLanes * c.live_floats));
  c.cost = c.slots * c.row_blocks * c.row_tiles * row_tile * kWantedSimdgroups / resident;
  // The matrix body's estimate rests on one number, the 17.5 slots of a product: it has to win by a third.
  if (body == Body::matrix) c.cost = c.cost * 4 / 3;
  return c;
}

void require_asked(const Policy& asked, const Capabilities& gpu) {
  const auto field = [](const char* name, std::int64_t value, bool fits, const std::string& allowed) {
    if (!fits) core::refuse(ErrorCode::InvalidArgument, name, std::to_string(value), allowed);
  };
  const std::int64_t tile = asked.row_tile;
  field("policy.body", asked.body, asked.body >= 0 && asked.body <= 3,
        "0 (choose), 1 (vector), 2 (matrix) or 3 (per_head)");
  if (asked.body == static_cast<std::int64_t>(Body::matrix)) {
    field("policy.row_tile", tile, tile == 0 || tile == 8, "0 (choose) or 8 for the matrix body");
  } else if (asked.body == static_cast<std::int64_t>(Body::per_head)) {
    field("policy.row_tile", tile, tile == 0 || tile == 1, "0 (choose) or 1 for the per_head body");
  } else {
    field("policy.row_tile", tile, tile == 0 || tile == 1 || tile == 2 || tile == 4 || tile == 8 || tile == 16,
          "0 (choose), 1, 2, 4, 8 or 16");
  }
  field("policy.chunk_tokens", asked.chunk_tokens,
        asked.chunk_tokens == 0 || asked.body != static_cast<std::int64_t>(Body::per_head),
        "0 for the per_head body, whose chunks take every num_chunks-th token");
  field("policy.rows_per_worker", asked.rows_per_worker, asked.rows_per_worker >= 0 && asked.rows_per_worker <= 256,
        "0 (choose) to 256");
  field("policy.chunk_tokens", asked.chunk_tokens, asked.chunk_tokens >= 0 && asked.chunk_tokens <= (1LL << 30),
        "0 (choose) to 2^30 on the metal backend");
  field("policy.splits", asked.splits, asked.splits >= 0 && asked.splits <= kMaxChunks, "0 (choose) to 65535");
  const std::int64_t most = gpu.max_threads / kLanes;
  field("policy.simdgroups", asked.simdgroups, asked.simdgroups >= 0 && asked.simdgroups <= most,
        "0 (choose) to " + std::to_string(most) + ": a threadgroup has at most " + std::to_string(gpu.max_threads) +
            " threads");
}

std::string kernel_id(Body body, KvFormat format, const Shape& s, std::int64_t row_tile) {
  return std::string("attend_metal_") + to_string(body) + "_" + std::string(kvonce::to_string(format)) + "_d" +
         std::to_string(s.dim_qk) + "x" + std::to_string(s.dim_v) + "_r" + std::to_string(row_tile);
}

std::vector<Candidate> all_candidates(const Shape& s, KvFormat format, const Capabilities& gpu, const Policy& asked) {
  constexpr std::pair<Body, std::int64_t> kAll[] = {{Body::vector, 1},  {Body::vector, 2},  {Body::vector, 4},
                                                    {Body::vector, 8},  {Body::vector, 16}, {Body::matrix, 8},
                                                    {Body::per_head, 1}};
  std::vector<Candidate> all;
  for (const auto& [body, tile] : kAll) {
    Candidate c = consider(body, tile, s, gpu, asked);
    c.name = kernel_id(body, format, s, tile);
    if (c.refusal.empty()) {
      if (asked.body != 0 && asked.body != static_cast<std::int64_t>(body)) {
        c.refusal = "policy.body is " + std::to_string(asked.body);
      } else if (asked.row_tile != 0 && asked.row_tile != tile) {
        c.refusal = "policy.row_tile is " + std::to_string(asked.row_tile);
      } else if (body == Body::per_head && asked.body == 0) {
        c.refusal = "the baseline, which reads K and V once per row; policy.body=3 asks for it";
      }
    }
    all.push_back(std::move(c));
  }
  return all;
}

/// Reading once comes first, then the fewest slots; says of every other one why not.
Candidate pick(const std::vector<Candidate>& all, std::int64_t rows, const Policy& asked,
               std::vector<std::string>& rejected) {
  const Candidate* chosen = nullptr;
  for (const Candidate& c : all) {
    if (!c.refusal.empty()) continue;
    if (chosen == nullptr || std::pair(c.row_blocks, c.cost) < std::pair(chosen->row_blocks, chosen->cost)) chosen = &c;
  }
  for (const Candidate& c : all) {
    if (&c == chosen) continue;
    std::string reason = c.refusal;
    if (reason.empty() && chosen != nullptr) {
      reason = c.row_blocks > chosen->row_blocks
                   ? "read factor " + std::to_string(c.row_blocks) + ", the chosen one has " +
                         std::to_string(chosen->row_blocks)
                   : "estimated cost " + std::to_string(c.cost / rows) + ", the chosen one " +
                         std::to_string(chosen->cost / rows) + " (issue slots per 64 row-token pairs, weighed)";
    }
    rejected.push_back(c.name + ": " + reason);
  }
  if (chosen != nullptr) return *chosen;
  std::string given;
  std::string reasons;
  if (asked.body != 0) given = "body=" + std::to_string(asked.body);
  if (asked.row_tile != 0) given += (given.empty() ? "row_tile=" : ",row_tile=") + std::to_string(asked.row_tile);
  for (const std::string& reason : rejected) reasons += (reasons.empty() ? "" : "; ") + reason;
  core::refuse(ErrorCode::InvalidArgument, "policy", given, "a body and a row tile for these head dims: " + reasons);
}

std::int64_t choose_chunks(const Candidate& c, const Shape& s, std::int64_t step_tokens, std::int64_t streams,
                           std::int64_t tokens, const Capabilities& gpu) {
  const std::int64_t block_rows = std::min(s.rows, c.row_tile * c.row_tiles);
  const std::int64_t simdgroups =
      std::max(c.row_tiles, c.token_parts) * std::max<std::int64_t>(1, streams * c.row_blocks);
  const auto goal = [&](std::int64_t per_core, std::int64_t weight) {
    const std::int64_t least = std::max(ceil_div(weight * 4 * block_rows * (s.dim_v + kPartialScalars), s.token_bytes),
                                        c.token_parts * step_tokens);
    const std::int64_t wanted = ceil_div((gpu.num_cores > 0 ? gpu.num_cores : kUnknownCores) * per_core, simdgroups);
    return std::min(wanted, ceil_div(tokens, least));
  };
  const std::int64_t chunks =
      std::max(goal(kWantedSimdgroups * kWaves, kPartialWeight), goal(kWantedSimdgroups, kMostPartialWeight));
  return std::clamp<std::int64_t>(chunks, 1, kMaxChunks);
}

/// Grids and the partials' bytes. The products stay within 64 bits: heads and sequences are at most 2^20 each.
void require_launch(const Problem& p, const Decision& d) {
  const auto require = [](const char* what, std::int64_t count, const char* instead) {
    core::require_served(count <= kMaxGrid, Backend::metal, what + std::string(" ") + std::to_string(count), instead);
  };
  require("token chunks times threads", d.num_chunks * d.threads, "choose larger chunk_tokens");
  require("num_kv_heads times row blocks", p.num_kv_heads * d.row_blocks, "run fewer heads at a time");
  require("rows of all sequences times threads of the merge", d.merge_threadgroups * kLanes * d.merge_simdgroups,
          "run fewer sequences at a time");
  constexpr std::int64_t kMostBytes = 1LL << 62;
  if (d.merge_threadgroups * d.num_chunks > kMostBytes / ((p.head_dim_v + kPartialScalars) * 4)) {
    core::refuse(ErrorCode::InvalidArgument, "workspace", "more than 2^62 bytes",
                 "fewer sequences, heads or max_kv_len, or larger chunk_tokens");
  }
}

/// The bytes count once, as in the fit: per_head's repeated reads come from a cache.
double predict_us(const Problem& p, const Shape& s, const Decision& d, const Capabilities& gpu, std::int64_t tokens) {
  const std::int64_t padded = d.body == Body::per_head ? s.rows : d.row_blocks * d.rows_per_worker;
  const double stream_tokens = static_cast<double>(p.num_seqs * p.num_kv_heads) * static_cast<double>(tokens);
  const double read_bytes = stream_tokens * static_cast<double>(s.token_bytes);
  const double partial_bytes = 2.0 * static_cast<double>(d.workspace_bytes);
  const double bytes_us = (read_bytes + partial_bytes) / ((gpu.read_gbps > 0.0 ? gpu.read_gbps : kFitGbps) * 1e3);
  const double cores = gpu.num_cores > 0 ? static_cast<double>(gpu.num_cores) : kFitCores;
  const double slots_us = stream_tokens * static_cast<double>(padded) * static_cast<double>(d.slots) / 64.0 /
                          (kFitSlotsPerUs * cores / kFitCores);
  return kFitStartUs + std::max(bytes_us, slots_us);
}

}  // namespace

const char* to_string(Body body) noexcept {
  switch (body) {
    case Body::vector:
      return "vector";
    case Body::matrix:
      return "matrix";
    case Body::per_head:
      return "per_head";
  }
  return "unknown";
}

std::int64_t family_of(std::string_view target) noexcept {
  constexpr std::string_view kPrefix = "apple";
  if (!target.starts_with(kPrefix)) return 0;
  std::int64_t family = 0;
  const std::string_view number = target.substr(kPrefix.size());
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), family);
  const bool whole = error == std::errc() && end == number.data() + number.size();
  return whole && family >= 7 && family <= 99 ? family : 0;
}

Capabilities capabilities(const Device& device) {
  Capabilities gpu;
  gpu.family = family_of(device.target);
  if (gpu.family == 0) {
    core::refuse(ErrorCode::Unavailable, "device.target", core::quoted(device.target),
                 "apple7 (M1) and later families of a backend metal device, as metal_device() gives it");
  }
  const auto field = [](const char* name, std::int64_t value, bool fits, const std::string& allowed) {
    if (!fits) core::refuse(ErrorCode::InvalidArgument, name, std::to_string(value), allowed);
  };
  field("device.num_sms", device.num_sms, device.num_sms >= 0, "0 (unknown) or the number of GPU cores");
  field("device.threadgroup_bytes", device.threadgroup_bytes,
        device.threadgroup_bytes == 0 || device.threadgroup_bytes >= kLeastSharedBytes,
        "0 (32 KB) or at least " + std::to_string(kLeastSharedBytes));
  field("device.max_threadgroup_threads", device.max_threadgroup_threads,
        device.max_threadgroup_threads == 0 || device.max_threadgroup_threads >= kLanes,
        "0 (unknown) or at least " + std::to_string(kLanes));
  gpu.num_cores = device.num_sms;
  constexpr std::int64_t kMostBytes = kvonce_metal::kMaxSharedBytes;
  gpu.threadgroup_bytes = device.threadgroup_bytes > 0 ? std::min(device.threadgroup_bytes, kMostBytes) : kMostBytes;
  gpu.max_threads =
      device.max_threadgroup_threads > 0 ? std::min(device.max_threadgroup_threads, kMostThreads) : kSafeThreads;
  gpu.read_gbps = device.read_gbps;
  return gpu;
}

Decision choose(const Problem& p, const Capabilities& gpu, const Policy& asked) {
  const auto require_dim = [](const char* name, std::int64_t dim) {
    core::require_served(dim <= kvonce_metal::kMaxHeadDim, Backend::metal,
                         name + std::string(" ") + std::to_string(dim), "use dims up to 512");
  };
  require_dim("head_dim_qk", p.head_dim_qk);
  require_dim("head_dim_v", p.head_dim_v);
  if (is_affine(p.k_format)) {
    const auto require_whole = [](const char* name, std::int64_t dim) {
      core::require_served(dim % 64 == 0, Backend::metal,
                           name + std::string(" ") + std::to_string(dim) + " with a quantised cache",
                           "use a multiple of 64");
    };
    require_whole("head_dim_qk", p.head_dim_qk);
    require_whole("head_dim_v", p.head_dim_v);
  }
  require_asked(asked, gpu);
  const Shape s = shape_of(p);
  Decision d;
  const Candidate c = pick(all_candidates(s, p.k_format, gpu, asked), s.rows, asked, d.rejected);
  const bool per_head = c.body == Body::per_head;
  d.body = c.body;
  d.kernel_id = c.name;
  d.row_tile = c.row_tile;
  d.row_tiles = c.row_tiles;
  d.token_parts = c.token_parts;
  d.row_blocks = c.row_blocks;
  d.rows_per_worker = per_head ? 1 : c.row_tile * c.row_tiles;
  d.read_factor = per_head ? s.rows : c.row_blocks;
  d.step_tokens = per_head ? 1 : kvonce_metal::step_tokens(c.body == Body::matrix, static_cast<int>(c.row_tile));
  const std::int64_t simdgroups = std::max(c.row_tiles, c.token_parts);
  const auto require = [&](const char* name, std::int64_t value, std::int64_t fits, const std::string& where) {
    if (value != 0 && value != fits) {
      core::refuse(ErrorCode::InvalidArgument, name, std::to_string(value),
                   "0 (choose) or " + std::to_string(fits) + " for " + c.name + where);
    }
  };
  const std::string rows_text = " and " + std::to_string(s.rows) + " rows";
  require("policy.step_tokens", asked.step_tokens, d.step_tokens, "");
  require("policy.rows_per_worker", asked.rows_per_worker, d.rows_per_worker, rows_text);
  require("policy.simdgroups", asked.simdgroups, simdgroups, rows_text);

  const std::int64_t tokens = p.window > 0 ? std::min(p.max_kv_len, p.window + p.q_len - 1) : p.max_kv_len;
  d.fixed_chunk_tokens = asked.chunk_tokens;
  if (asked.chunk_tokens > 0) {
    d.num_chunks = std::max<std::int64_t>(1, ceil_div(p.max_kv_len, asked.chunk_tokens));
    d.chunk_tokens = asked.chunk_tokens;
  } else {
    d.num_chunks =
        asked.splits > 0 ? asked.splits : choose_chunks(c, s, d.step_tokens, p.num_seqs * p.num_kv_heads, tokens, gpu);
    d.chunk_tokens = std::max<std::int64_t>(1, ceil_div(p.max_kv_len, d.num_chunks));
  }
  d.threads = kLanes * simdgroups;
  d.threadgroup_bytes = c.shared_bytes;
  d.merge_simdgroups = std::max<std::int64_t>(
      1, std::min({std::int64_t{kvonce_metal::kMaxMergeSimdgroups}, gpu.max_threads / kLanes, d.num_chunks / 4}));
  d.merge_threadgroup_bytes = 4 * d.merge_simdgroups * s.dim_v;
  d.merge_threadgroups = p.num_seqs * p.num_q_heads * p.q_len;
  d.live_floats = c.live_floats;
  d.slots = c.slots;
  require_launch(p, d);
  d.workspace_bytes = d.merge_threadgroups * d.num_chunks * (s.dim_v + kPartialScalars) * 4;
  d.predicted_us = predict_us(p, s, d, gpu, tokens);
  return d;
}

}  // namespace kvonce::metal
