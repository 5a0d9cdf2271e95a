// Pairwise sampling. A row chooses one level of each factor. Rows are added greedily: of some random rows that contain a
// pair nobody has covered yet, the one that covers the most new pairs is kept. Rows that would cost too much are made
// cheaper before they are judged, so that what counts as covered is what runs.
#include "grid.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <sstream>
#include <string>

#include "generator.hpp"
#include "run_case.hpp"

namespace kvonce::conformance {
namespace {

enum Factor : std::size_t {
  kKFormat,
  kVFormat,
  kQDType,
  kOutDType,
  kGroup,
  kKvHeads,
  kDims,
  kLength,
  kQLen,
  kBatch,
  kMasking,
  kChunk,
  kThreads,
  kLayout,
  kStarts,
  kPoison,
  kLse,
  kNumFactors,
};

struct Dims {
  std::int64_t qk, v;
};

struct LengthClass {
  std::int64_t low, high;
};

const std::vector<KvFormat> kFormats = {
#define KVONCE_FORMAT(name) KvFormat::name,
#include "shared/instances.def"
};
const std::vector<DType> kDTypes = {DType::f32, DType::f16, DType::bf16};
const std::vector<std::int64_t> kGroups = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 71};
const std::vector<std::int64_t> kHeads = {1, 2, 3, 4, 5, 8};
const std::vector<Dims> kDimsList = {
#define KVONCE_HEAD_DIMS(qk, v) {qk, v},
#include "shared/instances.def"
    {8, 8}, {16, 16}, {24, 24}, {40, 40}, {48, 48}, {56, 56}, {72, 72}, {88, 88}, {120, 120}, {72, 40}, {1000, 1000}};
const std::vector<LengthClass> kLengths = {{0, 0},     {1, 1},       {2, 16},      {17, 64},    {65, 130},
                                           {255, 258}, {1023, 1026}, {4095, 4097}, {8191, 8193}};
const std::vector<std::int64_t> kQLens = {1, 2, 3, 5, 8, 16};
const std::vector<std::int64_t> kBatches = {1, 2, 3, 5};
const std::vector<std::int64_t> kChunks = {0, 1, 7, 32, 64, 129, 1024};
const std::vector<int> kThreadCounts = {1, 2, 3, 7};
const std::vector<std::int64_t> kWindows = {1, 2, 17, 127, 128, 129, 4096};
enum Masking : std::size_t { kCausal, kNoMask, kWindow, kNumMaskings };
enum LayoutKind : std::size_t { kPacked, kTokenMajor, kSlice, kGaps, kExpanded, kNumLayouts };

using Row = std::array<std::size_t, kNumFactors>;

Row factor_sizes() {
  return {kFormats.size(),
          kFormats.size(),
          kDTypes.size(),
          kDTypes.size(),
          kGroups.size(),
          kHeads.size(),
          kDimsList.size(),
          kLengths.size(),
          kQLens.size(),
          kBatches.size(),
          kNumMaskings,
          kChunks.size(),
          kThreadCounts.size(),
          kNumLayouts,
          2,
          2,
          2};
}

double cost(const Row& row) {
  const Dims dims = kDimsList[row[kDims]];
  const std::int64_t longest = kLengths[row[kLength]].high;
  const std::int64_t others = (kBatches[row[kBatch]] - 1) * std::min<std::int64_t>(longest, 130);
  const std::int64_t rows = kGroups[row[kGroup]] * kQLens[row[kQLen]];
  double value = static_cast<double>(longest + others) * static_cast<double>(kHeads[row[kKvHeads]]) *
                 static_cast<double>(dims.qk + dims.v) * static_cast<double>(rows + 8);
  // One partial per row and token chunk.
  const std::int64_t chunk = kChunks[row[kChunk]];
  if (chunk > 0 && chunk < 16) value += value * 4.0 / static_cast<double>(chunk);
  return value;
}

// Lowers levels of the factors outside the pair (a, b) until the row is cheap enough, then the pair's own.
void make_cheaper(Row& row, std::size_t a, std::size_t b, double max_cost) {
  for (const bool own : {false, true}) {
    for (const std::size_t factor : {kQLen, kKvHeads, kGroup, kBatch, kLength, kDims}) {
      if (!own && (factor == a || factor == b)) continue;
      while (cost(row) > max_cost && row[factor] > 0) --row[factor];
    }
  }
}

class Coverage {
 public:
  explicit Coverage(const Row& sizes) : sizes_(sizes) {
    std::size_t total = 0;
    for (std::size_t a = 0; a < kNumFactors; ++a) {
      for (std::size_t b = a + 1; b < kNumFactors; ++b) {
        base_[a][b] = total;
        total += sizes[a] * sizes[b];
      }
    }
    covered_.assign(total, false);
  }

  [[nodiscard]] std::size_t new_pairs(const Row& row) const {
    std::size_t count = 0;
    for_pairs(row, [&](std::size_t at) { count += covered_[at] ? 0U : 1U; });
    return count;
  }

  void add(const Row& row) {
    for_pairs(row, [&](std::size_t at) { covered_[at] = true; });
  }

  // Writes a random uncovered pair into the row and returns its factors; false when all pairs are covered.
  bool put_uncovered(Random& random, Row& row, std::size_t& a_out, std::size_t& b_out) const {
    const auto start = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(covered_.size())));
    for (std::size_t i = 0; i < covered_.size(); ++i) {
      const std::size_t at = (start + i) % covered_.size();
      if (covered_[at]) continue;
      for (std::size_t a = 0; a < kNumFactors; ++a) {
        for (std::size_t b = a + 1; b < kNumFactors; ++b) {
          if (at < base_[a][b] || at >= base_[a][b] + sizes_[a] * sizes_[b]) continue;
          row[a] = (at - base_[a][b]) / sizes_[b];
          row[b] = (at - base_[a][b]) % sizes_[b];
          a_out = a;
          b_out = b;
          return true;
        }
      }
    }
    return false;
  }

 private:
  template <typename Visit>
  void for_pairs(const Row& row, Visit visit) const {
    for (std::size_t a = 0; a < kNumFactors; ++a) {
      for (std::size_t b = a + 1; b < kNumFactors; ++b) visit(base_[a][b] + row[a] * sizes_[b] + row[b]);
    }
  }

  Row sizes_;
  std::array<std::array<std::size_t, kNumFactors>, kNumFactors> base_{};
  std::vector<bool> covered_;
};

void set_layouts(CaseSpec& spec, std::size_t kind, Random& random) {
  for (TensorLayout* layout : {&spec.q, &spec.k, &spec.v, &spec.out}) {
    const bool is_cache = layout == &spec.k || layout == &spec.v;
    if (kind == kTokenMajor) layout->token_major = true;
    if (kind == kSlice) layout->spare_tokens = random.between(1, 40);
    if (kind == kGaps) {
      layout->row_gap = random.pick(std::vector<std::int64_t>{1, 3, 4, 8, 17});
      layout->token_major = random.below(2) == 0;
    }
    if (kind == kExpanded && is_cache) layout->expand_heads = true;
    // Payload alignments: one element is the smallest that the API allows; -1 ends at an unmapped page.
    layout->offset_bytes = random.pick(std::vector<std::int64_t>{-1, -1, 0, 4, 8, 16, 20});
  }
}

CaseSpec make_spec(const Row& row, std::uint64_t seed) {
  Random random(seed);
  CaseSpec spec;
  spec.seed = seed;
  Problem& p = spec.problem;
  p.k_format = kFormats[row[kKFormat]];
  p.v_format = kFormats[row[kVFormat]];
  p.q_dtype = kDTypes[row[kQDType]];
  p.out_dtype = kDTypes[row[kOutDType]];
  p.num_kv_heads = kHeads[row[kKvHeads]];
  p.num_q_heads = p.num_kv_heads * kGroups[row[kGroup]];
  p.head_dim_qk = kDimsList[row[kDims]].qk;
  p.head_dim_v = kDimsList[row[kDims]].v;
  p.q_len = kQLens[row[kQLen]];
  p.num_seqs = kBatches[row[kBatch]];
  p.causal = row[kMasking] != kNoMask;
  if (row[kMasking] == kWindow) p.window = random.pick(kWindows);
  p.v_is_k_prefix = p.head_dim_v < p.head_dim_qk && p.k_format == p.v_format && random.below(2) == 0;

  const LengthClass length = kLengths[row[kLength]];
  const std::int64_t longest = random.between(length.low, length.high);
  const std::int64_t longest_seq = random.below(p.num_seqs);
  const bool null_lens = p.num_seqs == 1 && random.below(2) == 0;
  p.max_kv_len = longest + (null_lens ? 0 : random.below(7));
  for (std::int64_t seq = 0; seq < p.num_seqs && !null_lens; ++seq) {
    const std::int64_t kv_len = seq == longest_seq ? longest : random.between(0, std::min<std::int64_t>(longest, 130));
    spec.kv_lens.push_back(static_cast<std::int32_t>(kv_len));
  }
  for (std::int64_t seq = 0; seq < p.num_seqs && row[kStarts] == 1; ++seq) {
    const std::int64_t kv_len = null_lens ? p.max_kv_len : spec.kv_lens[static_cast<std::size_t>(seq)];
    spec.kv_starts.push_back(static_cast<std::int32_t>(random.between(0, std::min<std::int64_t>(kv_len, 33))));
  }
  spec.options.chunk_tokens = kChunks[row[kChunk]];
  spec.num_threads = kThreadCounts[row[kThreads]];
  spec.poison = row[kPoison] == 0 ? Poison::nan : Poison::large;
  spec.want_lse = row[kLse] == 0;
  set_layouts(spec, row[kLayout], random);
  return spec;
}

std::string describe(const CaseSpec& spec, const Row& row, std::uint64_t case_seed) {
  const char* layouts[] = {"packed", "bshd", "slice", "gaps", "expanded"};
  const Problem& p = spec.problem;
  std::ostringstream text;
  text << "grid seed=" << case_seed << ' ' << p.num_q_heads << "q/" << p.num_kv_heads << "kv d" << p.head_dim_qk << 'x'
       << p.head_dim_v << " k=" << to_string(p.k_format) << " v=" << to_string(p.v_format)
       << (p.v_is_k_prefix ? "(k's prefix)" : "") << " q_dtype=" << to_string(p.q_dtype)
       << " out=" << to_string(p.out_dtype) << " q=" << p.q_len << " seqs=" << p.num_seqs << " kv=";
  if (spec.kv_lens.empty()) text << p.max_kv_len;
  for (std::size_t i = 0; i < spec.kv_lens.size(); ++i) text << (i > 0 ? "," : "") << spec.kv_lens[i];
  if (!spec.kv_starts.empty()) text << " starts=";
  for (std::size_t i = 0; i < spec.kv_starts.size(); ++i) text << (i > 0 ? "," : "") << spec.kv_starts[i];
  text << " causal=" << p.causal << " window=" << p.window << " chunk=" << spec.options.chunk_tokens
       << " threads=" << spec.num_threads << ' ' << layouts[row[kLayout]];
  return text.str();
}

// CUDA: how a stream's blocks split and join, which the CPU has no counterpart of. A third of the cases keep their
// chunk_tokens, in whole tiles of 16.
void set_cuda_policy(CaseSpec& spec) {
  Random random(spec.seed + 5000);
  Policy policy;
  // The tensor-core kernel takes 8 or 16 rows, 16 up to 128 dims; the generic one has no choice.
  const Problem& p = spec.problem;
  const bool one_tile = std::max(p.head_dim_qk, p.dim_v()) > 128;
  const bool one_type = static_cast<int>(p.q_dtype) == static_cast<int>(p.k_format) && p.k_format == p.v_format;
  const std::int64_t row_tile = random.pick(std::vector<std::int64_t>{0, 8, one_tile ? 8 : 16});
  if (one_type && p.k_format != KvFormat::f32 && p.head_dim_qk % 64 == 0 && !one_tile) policy.row_tile = row_tile;
  policy.cluster = random.between(-1, 1);
  policy.join_blocks = random.pick(std::vector<std::int64_t>{0, 0, 1, 2, 3, 7, 16});
  if (random.below(3) == 0) {
    policy.chunk_tokens = (spec.options.chunk_tokens + 15) / 16 * 16;
  } else {
    policy.splits = random.pick(std::vector<std::int64_t>{0, 0, 1, 2, 3, 5, 8, 16, 33, 132});
  }
  spec.options.chunk_tokens = 0;
  spec.options.policy = policy;
  spec.name += " policy=" + to_string(policy);
}

}  // namespace

GridLimits grid_limits(Level level, std::uint64_t seed) {
  switch (level) {
    case Level::quick:
      return {seed, 120, 6e6};
    case Level::standard:
      return {seed, 600, 4e7};
    case Level::full:
      return {seed, 2000, 4e8};
  }
  return {seed, 0, 0};
}

std::vector<CaseSpec> grid_cases(const GridLimits& limits) {
  constexpr int kCandidates = 40;
  const Row sizes = factor_sizes();
  Coverage coverage(sizes);
  Random random(limits.seed);
  std::vector<CaseSpec> cases;
  int fruitless = 0;
  while (cases.size() < limits.max_cases && fruitless < 20) {
    Row best{};
    std::size_t best_pairs = 0;
    for (int candidate = 0; candidate < kCandidates; ++candidate) {
      Row row{};
      for (std::size_t factor = 0; factor < kNumFactors; ++factor) {
        row[factor] = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(sizes[factor])));
      }
      std::size_t a = 0;
      std::size_t b = 0;
      if (!coverage.put_uncovered(random, row, a, b)) return cases;
      make_cheaper(row, a, b, limits.max_cost);
      const std::size_t pairs = coverage.new_pairs(row);
      if (pairs > best_pairs) {
        best = row;
        best_pairs = pairs;
      }
    }
    if (best_pairs == 0) {
      ++fruitless;
      continue;
    }
    fruitless = 0;
    coverage.add(best);
    const std::uint64_t case_seed = limits.seed * 100000 + cases.size();
    cases.push_back(make_spec(best, case_seed));
    cases.back().name = describe(cases.back(), best, case_seed);
  }
  return cases;
}

CaseSpec with_score_rules(const CaseSpec& plain) {
  CaseSpec spec = plain;
  Random random(plain.seed + 9000);
  Problem& p = spec.problem;
  p.mask = random.pick(std::vector<MaskKind>{MaskKind::none, MaskKind::boolean, MaskKind::additive, MaskKind::additive,
                                             MaskKind::additive, MaskKind::tree});
  if (p.mask == MaskKind::additive) {
    p.mask_dtype = random.pick(kDTypes);
    p.has_mask_slopes = random.below(3) == 0;
  }
  if (p.mask == MaskKind::boolean || p.mask == MaskKind::additive) {
    spec.mask.one_seq = random.below(3) == 0;
    spec.mask.one_head = random.below(3) != 0;
    spec.mask.one_row = random.below(4) == 0;
    spec.mask.token_gap = random.pick(std::vector<std::int64_t>{0, 0, 1, 3});
    // A third random throughout; else runs of tokens that are all seen, all hidden or mixed, without other entries.
    if (random.below(3) != 0) {
      const std::int64_t run = random.pick(std::vector<std::int64_t>{16, 64, 200, 1000});
      const double shown = p.mask == MaskKind::boolean ? 1.0 : 0.0;
      const double hidden = p.mask == MaskKind::boolean ? 0.0 : -std::numeric_limits<double>::infinity();
      spec.mask_value = [run, shown, hidden, seed = spec.seed](std::int64_t seq, std::int64_t head, std::int64_t row,
                                                               std::int64_t token) {
        const auto kind = splitmix64(seed + static_cast<std::uint64_t>(token / run * 64 + seq)) % 4;
        const auto own = splitmix64(seed * 31 + static_cast<std::uint64_t>((token * 80 + head) * 16 + row)) % 2;
        return kind == 0 || (kind == 1 && own == 0) ? hidden : shown;
      };
    }
  }
  p.has_alibi = p.mask == MaskKind::none || random.below(4) == 0;
  p.softcap = random.pick(std::vector<float>{0.0F, 0.0F, 1.5F, 50.0F});
  p.has_sinks = random.below(3) == 0;
  spec.name += " mask=" + std::string(to_string(p.mask)) + " of " + std::string(to_string(p.mask_dtype)) +
               " slopes=" + std::to_string(p.has_mask_slopes) + " alibi=" + std::to_string(p.has_alibi) +
               " softcap=" + std::to_string(p.softcap) + " sinks=" + std::to_string(p.has_sinks);
  return spec;
}

CaseSpec with_block_formats(const CaseSpec& plain) {
  CaseSpec spec = plain;
  Random random(plain.seed + 11000);
  Problem& p = spec.problem;
  const std::vector<KvFormat> blocks = {
#define KVONCE_BLOCK_FORMAT(name) KvFormat::name,
#include "shared/instances.def"
  };
  p.k_format = random.pick(blocks);
  p.v_format = random.pick(blocks);
  if (random.below(3) == 0) (random.below(2) == 0 ? p.k_format : p.v_format) = random.pick(kFormats);
  if (p.v_is_k_prefix) p.v_format = p.k_format;
  p.head_dim_qk = (p.head_dim_qk + 31) / 32 * 32;
  p.head_dim_v = (p.head_dim_v + 31) / 32 * 32;
  for (TensorLayout* layout : {&spec.k, &spec.v}) {
    if (layout->offset_bytes == 20) layout->offset_bytes = 2;  // blocks are aligned to two bytes
  }
  spec.name += " blocks k=" + std::string(to_string(p.k_format)) + " v=" + std::string(to_string(p.v_format)) + " d" +
               std::to_string(p.head_dim_qk) + 'x' + std::to_string(p.head_dim_v);
  return spec;
}

CaseSpec with_affine_formats(const CaseSpec& plain) {
  CaseSpec spec = plain;
  Random random(plain.seed + 13000);
  Problem& p = spec.problem;
  const std::vector<KvFormat> affine = {
#define KVONCE_AFFINE_FORMAT(name) KvFormat::name,
#include "shared/instances.def"
  };
  p.k_format = random.pick(affine);
  p.v_format = random.pick(affine);
  if (random.below(3) == 0) {
    const std::vector<KvFormat> others = {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8_0, KvFormat::q4_0};
    (random.below(2) == 0 ? p.k_format : p.v_format) = random.pick(others);
  }
  if (p.v_is_k_prefix) p.v_format = p.k_format;
  p.quant_group = 0;
  for (const KvFormat format : {p.k_format, p.v_format}) {
    if (std::find(affine.begin(), affine.end(), format) != affine.end()) p.quant_group = 32LL << random.below(3);
  }
  p.scales_dtype = p.quant_group > 0 ? random.pick(kDTypes) : DType::f32;
  const std::int64_t multiple = std::max<std::int64_t>(p.quant_group, 32);
  p.head_dim_qk = std::min<std::int64_t>(1024, (p.head_dim_qk + multiple - 1) / multiple * multiple);
  p.head_dim_v = std::min<std::int64_t>(1024, (p.head_dim_v + multiple - 1) / multiple * multiple);
  for (TensorLayout* layout : {&spec.k, &spec.v}) {
    if (layout->offset_bytes == 20) layout->offset_bytes = 2;
  }
  spec.name += " affine k=" + std::string(to_string(p.k_format)) + " v=" + std::string(to_string(p.v_format)) +
               " group " + std::to_string(p.quant_group) + " of " + std::string(to_string(p.scales_dtype)) + " d" +
               std::to_string(p.head_dim_qk) + 'x' + std::to_string(p.head_dim_v);
  return spec;
}

std::vector<CaseResult> run_grid(const Device& device, Level level, const OnResult& on_result) {
  std::vector<CaseResult> results;
  const std::uint64_t num_arrays = level == Level::full ? 10 : 1;
  for (std::uint64_t array = 1; array <= num_arrays; ++array) {
    for (CaseSpec spec : grid_cases(grid_limits(level, array))) {
      // Where kernels for pairs exist, those and the others run, whichever this processor would choose.
      const bool has_pairs = (device.target == "avx512_bf16" || device.target == "neon_bf16") &&
                             spec.problem.q_dtype == DType::bf16 && spec.problem.k_format == KvFormat::bf16;
      const std::int64_t most_pairs = !has_pairs ? 0 : spec.problem.v_format == KvFormat::bf16 ? 2 : 1;
      for (std::int64_t pair_dot = 0; pair_dot <= most_pairs; ++pair_dot) {
        if (device.backend == Backend::cpu) spec.options.policy.pair_dot = pair_dot;
        if (device.backend == Backend::cuda) set_cuda_policy(spec);
        CaseSpec named = spec;
        named.name = device.target + (pair_dot > 0 ? " pair_dot=" + std::to_string(pair_dot) + ' ' : " ") + spec.name;
        if (!is_wanted(named.name)) continue;
        results.push_back(check_oracle(named, device));
        if (on_result) on_result(results.back());
      }
      // Once more, every fourth case each (quick: every eighth), with what changes scores and hides keys, with block formats,
      // with MLX's formats, and every sixteenth with the first and either of the others.
      if (device.backend != Backend::cpu) continue;
      const std::uint64_t period = level == Level::quick ? 8 : 4;
      CaseSpec again = spec;
      if (spec.seed % period == 1 || spec.seed % (4 * period) == 0) again = with_block_formats(again);
      if (spec.seed % period == 2 || spec.seed % (4 * period) == period) again = with_affine_formats(again);
      if (spec.seed % period == 0) again = with_score_rules(again);
      if (again.name == spec.name) continue;
      again.name = device.target + " " + again.name;
      again.options.policy.pair_dot = -1;
      if (!is_wanted(again.name)) continue;
      results.push_back(check_oracle(again, device));
      if (on_result) on_result(results.back());
    }
  }
  return results;
}

}  // namespace kvonce::conformance
