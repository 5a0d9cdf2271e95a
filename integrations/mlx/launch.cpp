#include "launch.hpp"

#include <mlx/fast.h>
#include <mlx/ops.h>

#include <bit>
#include <charconv>
#include <string_view>
#include <vector>

#include "kernel_sources.hpp"
#include "metal/params.h"

namespace kvonce::mlx {
namespace {

namespace mx = ::mlx::core;

constexpr std::string_view kPlace = R"(
  kvonce_metal::Place place;
  place.x = int(threadgroup_position_in_grid.x);
  place.y = int(threadgroup_position_in_grid.y);
  place.z = int(threadgroup_position_in_grid.z);
  place.simdgroup = int(simdgroup_index_in_threadgroup);
  place.lane = int(thread_index_in_simdgroup);
)";

constexpr std::string_view kAttend = R"(
  threadgroup float shared[kSharedFloats];
  kvonce_metal::AttendBuffers<T> buffers;
  buffers.q = q;
  buffers.k = k;
  buffers.v = v;
  buffers.k_strides = k_strides;
  buffers.v_strides = v_strides;
)";

constexpr std::string_view kBuffers = R"(
  buffers.kv_lens = kv_lens;
  buffers.kv_starts = kv_starts;
  buffers.mask = (const device unsigned char*)mask;
  buffers.alibi_slopes = alibi_slopes;
  buffers.params = params;
  buffers.scalars = scalars;
  buffers.q_strides = q_strides;
  buffers.mask_strides = mask_strides;
  buffers.partial_o = partial_o;
  buffers.partial_sums = partial_sums;
)";

constexpr std::string_view kMerge = R"(
  threadgroup float shared[kSharedFloats];
  kvonce_metal::MergeBuffers buffers;
  buffers.partial_o = partial_o;
  buffers.partial_sums = partial_sums;
  buffers.sinks = sinks;
  buffers.params = params;
)";

std::string text(std::initializer_list<std::string_view> parts) {
  std::string joined;
  for (const std::string_view part : parts) joined += part;
  return joined;
}

mx::fast::CustomKernelFunction make_attend(const std::string& body, std::string_view body_source,
                                           std::string_view arguments) {
  return mx::fast::metal_kernel(
      "kvonce_attend_" + body, {"q", "k", "v", "kv_lens", "kv_starts", "mask", "alibi_slopes", "params", "scalars"},
      {"partial_o", "partial_sums"},
      text({kAttend, kBuffers, kPlace, "\n  kvonce_metal::attend_", body, "<", arguments,
            ">(buffers, shared, place);\n"}),
      text({kParamsSource, kDialectSource, kWorkSource, kTokensSource, kJoinSource, body_source}), false);
}

const mx::fast::CustomKernelFunction& attend_kernel(metal::Body body) {
  static const auto vector = make_attend("vector", kAttendSource, "T, kDimQk, kDimV, kRows");
  static const auto matrix = make_attend("matrix", kAttendMatrixSource, "T, kDimQk, kDimV");
  static const auto per_head = make_attend("per_head", kAttendPerHeadSource, "T, kDimQk, kDimV");
  return body == metal::Body::vector ? vector : body == metal::Body::matrix ? matrix : per_head;
}

const mx::fast::CustomKernelFunction& merge_kernel() {
  static const auto kernel = mx::fast::metal_kernel(
      "kvonce_merge", {"partial_o", "partial_sums", "sinks", "params"}, {"out", "lse"},
      text({kMerge, kPlace, "\n  kvonce_metal::merge_partials<T, kDimV>(buffers, out, lse, shared, place);\n"}),
      text({kParamsSource, kDialectSource, kWorkSource, kMergeSource}), false);
  return kernel;
}

DType dtype_of(mx::Dtype dtype) {
  return dtype == mx::float32 ? DType::f32 : dtype == mx::float16 ? DType::f16 : DType::bf16;
}

/// With more elements at the end of the last dim, packed.
mx::array padded(const mx::array& array, mx::StreamOrDevice s) {
  return mx::pad(array, {static_cast<int>(array.ndim()) - 1}, mx::Shape{0}, mx::Shape{kMinElements},
                 mx::array(0, array.dtype()), "constant", s);
}

/// The mask in 4 dims, broadcast with strides of 0, and its kind.
std::pair<mx::array, kvonce_metal::MaskKind> mask_of(const Call& call, mx::StreamOrDevice s) {
  if (!call.mask) return {mx::zeros({1, 1, 1, kMinElements}, mx::bool_, s), kvonce_metal::kMaskNone};
  auto mask = *call.mask;
  auto kind = kvonce_metal::kMaskAdditive;
  if (mask.dtype() == mx::bool_) {
    kind = kvonce_metal::kMaskBoolean;
  } else if (mask.dtype() == mx::float32) {
    kind = kvonce_metal::kMaskAdditiveF32;
  } else {
    mask = mx::astype(mask, call.q.dtype(), s);
  }
  mask = mx::broadcast_to(mask, {call.q.shape(0), call.q.shape(1), call.q.shape(2), call.k.shape(2)}, s);
  return {mask.size() < kMinElements ? padded(mask, s) : mask, kind};
}

mx::array params_of(const metal::Decision& plan, const Call& call, kvonce_metal::MaskKind mask_kind) {
  std::vector<std::int64_t> values(kvonce_metal::kNumParams, 0);
  values[kvonce_metal::kNumSeqs] = call.q.shape(0);
  values[kvonce_metal::kNumQHeads] = call.q.shape(1);
  values[kvonce_metal::kNumKvHeads] = call.k.shape(1);
  values[kvonce_metal::kQLen] = call.q.shape(2);
  values[kvonce_metal::kKvLen] = call.k.shape(2);
  values[kvonce_metal::kNumChunks] = plan.num_chunks;
  values[kvonce_metal::kChunkTokens] = plan.fixed_chunk_tokens;
  values[kvonce_metal::kRowTiles] = plan.row_tiles;
  values[kvonce_metal::kTokenParts] = plan.token_parts;
  values[kvonce_metal::kCausal] = call.causal ? 1 : 0;
  values[kvonce_metal::kMaskKind] = mask_kind;
  values[kvonce_metal::kHasSinks] = call.sinks ? 1 : 0;
  values[kvonce_metal::kMergeSimdgroups] = plan.merge_simdgroups;
  return mx::array(values.data(), mx::Shape{kvonce_metal::kNumParams}, mx::int64);
}

int as_int(std::int64_t value) { return static_cast<int>(value); }  // the policy keeps grids within int

}  // namespace

Device gpu_of_architecture(const std::string& architecture) {
  constexpr std::string_view kPrefix = "applegpu_g";
  int generation = 13;
  if (architecture.starts_with(kPrefix)) {
    std::from_chars(architecture.data() + kPrefix.size(), architecture.data() + architecture.size(), generation);
  }
  // g13 M1, g14 M2, g15 M3, g16 M4, g17 M5; M3 and M4 are one family.
  const int family = generation <= 13 ? 7 : generation == 14 ? 8 : generation <= 16 ? 9 : generation - 7;
  return metal_device("apple" + std::to_string(family));
}

metal::Decision plan_of(const Call& call, const Device& gpu) {
  Problem problem;
  problem.num_seqs = call.q.shape(0);
  problem.num_q_heads = call.q.shape(1);
  problem.num_kv_heads = call.k.shape(1);
  problem.q_len = call.q.shape(2);
  problem.head_dim_qk = call.q.shape(3);
  problem.head_dim_v = call.v.shape(3);
  problem.max_kv_len = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(call.k.shape(2))));
  problem.q_dtype = problem.out_dtype = dtype_of(call.q.dtype());
  problem.k_format = problem.v_format = static_cast<KvFormat>(problem.q_dtype);  // they agree in order
  return metal::choose(problem, metal::capabilities(gpu), Policy{});
}

std::pair<mx::array, mx::array> launch(const metal::Decision& plan, const Call& call, mx::StreamOrDevice s,
                                       bool verbose) {
  const auto [mask, mask_kind] = mask_of(call, s);
  const mx::array params = params_of(plan, call, mask_kind);
  std::vector<float> scalar_values(kvonce_metal::kNumScalars, 0.0F);
  scalar_values[kvonce_metal::kScale] = call.scale;
  const mx::array scalars(scalar_values.data(), mx::Shape{kvonce_metal::kNumScalars}, mx::float32);
  const mx::array no_ints = mx::zeros({kMinElements}, mx::int32, s);
  const mx::array no_floats = mx::zeros({kMinElements}, mx::float32, s);
  const mx::Dtype dtype = call.q.dtype();
  const int dim_v = call.v.shape(3);
  const int rows = call.q.shape(0) * call.q.shape(1) * call.q.shape(2);
  const int partials = rows * as_int(plan.num_chunks);

  using Template = std::vector<std::pair<std::string, mx::fast::TemplateArg>>;
  Template arguments = {{"T", dtype}, {"kDimQk", call.q.shape(3)}, {"kDimV", dim_v}};
  if (plan.body == metal::Body::vector) arguments.emplace_back("kRows", as_int(plan.row_tile));
  arguments.emplace_back("kSharedFloats", as_int(plan.threadgroup_bytes / 4));
  const int threads = as_int(plan.threads);
  const auto joined = attend_kernel(plan.body)(
      {call.q, call.k, call.v, no_ints, no_ints, mask, no_floats, params, scalars},
      {{partials * dim_v}, {std::max(2 * partials, kMinElements)}}, {mx::float32, mx::float32},
      {threads * as_int(plan.num_chunks), call.k.shape(1) * as_int(plan.row_blocks), call.q.shape(0)}, {threads, 1, 1},
      arguments, std::nullopt, verbose, s);

  const mx::array sinks = call.sinks ? padded(mx::astype(*call.sinks, mx::float32, s), s) : no_floats;
  const int merge_threads = kvonce_metal::kLanes * as_int(plan.merge_simdgroups);
  const auto merged = merge_kernel()(
      {joined[0], joined[1], sinks, params},
      {{call.q.shape(0), call.q.shape(1), call.q.shape(2), dim_v}, {call.q.shape(0), call.q.shape(1), call.q.shape(2)}},
      {dtype, mx::float32}, {merge_threads * rows, 1, 1}, {merge_threads, 1, 1},
      Template{{"T", dtype}, {"kDimV", dim_v}, {"kSharedFloats", as_int(plan.merge_threadgroup_bytes / 4)}},
      std::nullopt, verbose, s);
  return {merged[0], merged[1]};
}

}  // namespace kvonce::mlx
