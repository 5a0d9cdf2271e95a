#include "cases.hpp"

#include <algorithm>
#include <vector>

#include "grid.hpp"

namespace kvonce::emulation {

using conformance::CaseSpec;
using conformance::Random;

Choice random_choice(const Problem& p, std::int64_t longest, std::int64_t chunk_tokens, Body body,
                     std::int64_t row_tile, Random& random) {
  Choice choice;
  choice.body = body;
  choice.row_tile = row_tile;
  choice.order_seed = random.next();
  choice.merge_simdgroups = random.pick(std::vector<std::int64_t>{1, 2, 4, 8});
  choice.num_chunks = random.pick(std::vector<std::int64_t>{1, 1, 2, 3, 5, 8, 13});
  if (body == Body::per_head) {
    choice.row_tiles = std::min<std::int64_t>(random.pick(std::vector<std::int64_t>{1, p.group_size(), 32}), 32);
    return choice;
  }
  if (chunk_tokens > 0) {
    // No more than 64 chunks: every row has a partial in each.
    choice.chunk_tokens = std::max(chunk_tokens, (longest + 63) / 64);
    choice.num_chunks = std::max<std::int64_t>(1, (longest + choice.chunk_tokens - 1) / choice.chunk_tokens);
  }
  if (random.below(2) == 0) {
    choice.row_tiles = random.pick(std::vector<std::int64_t>{1, 2, 4, 16});
    const int element_bytes = p.q_dtype == DType::f32 || code_bits(p.k_format) > 0 ? 4 : 2;
    const int floats =
        kvonce_metal::shared_floats(body == Body::matrix, static_cast<int>(row_tile), static_cast<int>(p.head_dim_qk),
                                    static_cast<int>(p.dim_v()), element_bytes, static_cast<int>(choice.row_tiles), 1);
    if (floats * 4 > kvonce_metal::kMaxSharedBytes) choice.row_tiles = 1;
  } else {
    choice.token_parts = random.pick(std::vector<std::int64_t>{1, 2, 3, 4, 8, 16});
    choice.token_parts = std::min(choice.token_parts, kvonce_metal::kJoinFloats / p.dim_v());
  }
  return choice;
}

Choice choose(const CaseSpec& spec, Body body) {
  const Problem& p = spec.problem;
  Random random(spec.seed + 77 * static_cast<std::uint64_t>(body));
  std::vector<std::int64_t> row_tiles;
  for (const Instance& one : instances()) {
    if (one.body == body && one.dtype == p.q_dtype && one.head_dim_qk == p.head_dim_qk && one.head_dim_v == p.dim_v() &&
        one.bits == code_bits(p.k_format) && one.group == p.quant_group) {
      row_tiles.push_back(one.row_tile);
    }
  }
  if (row_tiles.empty()) throw Error(ErrorCode::Unsupported, "no such instance is compiled");
  return random_choice(p, p.max_kv_len, spec.options.chunk_tokens, body, random.pick(row_tiles), random);
}

CaseSpec fit(const CaseSpec& from, const Instance& kernel) {
  CaseSpec spec = from;
  Problem& p = spec.problem;
  p.q_dtype = kernel.dtype;
  p.out_dtype = kernel.dtype;
  p.k_format = static_cast<KvFormat>(kernel.dtype);
  if (kernel.bits > 0) {
    p.k_format = kernel.bits == 8 ? KvFormat::mlx_int8 : KvFormat::mlx_int4;
    p.quant_group = kernel.group;
    p.scales_dtype = kernel.dtype;
    // Rows of whole words.
    spec.k.row_gap = (spec.k.row_gap + 3) / 4 * 4;
    spec.v.row_gap = (spec.v.row_gap + 3) / 4 * 4;
  }
  p.v_format = p.k_format;
  p.head_dim_qk = kernel.head_dim_qk;
  p.head_dim_v = kernel.head_dim_v;
  p.v_is_k_prefix = p.v_is_k_prefix && kernel.head_dim_v < kernel.head_dim_qk && kernel.bits == 0;
  if (spec.seed % 2 == 0) spec = with_score_rules(spec);
  if (spec.problem.mask == MaskKind::tree || spec.problem.has_mask_slopes) spec.problem.mask = MaskKind::boolean;
  spec.problem.has_mask_slopes = false;
  if (spec.problem.mask == MaskKind::additive && spec.problem.mask_dtype != DType::f32) {
    spec.problem.mask_dtype = kernel.dtype;
  }
  if (spec.problem.mask != MaskKind::additive) spec.problem.mask_dtype = DType::f32;
  if (spec.problem.mask == MaskKind::boolean && from.problem.mask != MaskKind::boolean) spec.mask_value = {};
  return spec;
}

std::vector<GridCase> grid_cases(std::size_t cases_per_instance, double max_cost) {
  const std::size_t count = instances().size() * cases_per_instance;
  std::vector<CaseSpec> specs;
  for (std::uint64_t seed = 7; specs.size() < count; ++seed) {
    const auto more = conformance::grid_cases({seed, count - specs.size(), max_cost});
    if (more.empty()) throw Error(ErrorCode::Internal, "the grid has no cases of this cost");
    specs.insert(specs.end(), more.begin(), more.end());
  }
  std::vector<GridCase> cases;
  for (std::size_t i = 0; i < count; ++i) {
    const Instance& instance = instances()[i % instances().size()];
    GridCase one{fit(specs[i], instance), {}};
    const Problem& p = one.spec.problem;
    Random random(one.spec.seed);
    one.choice =
        random_choice(p, p.max_kv_len, one.spec.options.chunk_tokens, instance.body, instance.row_tile, random);
    one.spec.name += " on " + one.choice.name();
    cases.push_back(std::move(one));
  }
  return cases;
}

}  // namespace kvonce::emulation
