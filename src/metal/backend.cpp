// Plans for an Apple GPU that the caller describes. Nothing runs here: MLX compiles and launches the kernels' text, from
// Python (python/kvonce/mlx.py) or C++ (integrations/mlx).
#include "metal/backend.hpp"

#include <cstdio>
#include <string>

#include "core/refuse.hpp"
#include "core/served.hpp"
#include "metal/metal_plan.hpp"

namespace kvonce::metal {
namespace {

constexpr const char* kNoRuntime =
    "backend metal: this library has no Metal runtime; on an Apple GPU MLX launches the kernels (in Python kvonce.mlx, "
    "in C++ "
    "integrations/mlx); use backend cpu here";

std::vector<Device> devices() {
  Device device;
  device.backend = Backend::metal;
  device.unavailable = kNoRuntime;
  return {device};
}

void attend_nowhere(const core::PlanData&, const Inputs&, const Outputs&, void*, const Context&) {
  throw Error(ErrorCode::Unavailable, kNoRuntime);
}

void nowhere(const core::PlanData&, void*, const Context&) { throw Error(ErrorCode::Unavailable, kNoRuntime); }

void require(bool served, const std::string& what, const std::string& instead) {
  core::require_served(served, Backend::metal, what, instead);
}

void require_problem(const Problem& p, const PlanOptions& options) {
  core::require_plain_layout(p, Backend::metal);
  const auto q_format = static_cast<KvFormat>(p.q_dtype);  // they agree in order
  const bool affine = p.k_format == KvFormat::mlx_int8 || p.k_format == KvFormat::mlx_int4;
  require(p.k_format == p.v_format && (affine || p.k_format == q_format),
          "q_dtype " + std::string(to_string(p.q_dtype)) + " with k_format " + std::string(to_string(p.k_format)) +
              " and v_format " + std::string(to_string(p.v_format)),
          "give q, K and V one type, or K and V mlx_int8 or mlx_int4");
  require(!affine || p.scales_dtype == p.q_dtype, "scales_dtype " + std::string(to_string(p.scales_dtype)),
          "give scales and biases in q's type");
  require(p.mask != MaskKind::tree, "mask tree", "give the tree as a boolean mask over all keys");
  require(!p.has_mask_slopes, "has_mask_slopes", "multiply the mask beforehand");
  require(p.mask != MaskKind::additive || p.mask_dtype == DType::f32 || p.mask_dtype == p.q_dtype,
          "mask_dtype " + std::string(to_string(p.mask_dtype)), "give the mask as f32 or in q's type");
  require(!p.v_is_k_prefix, "v_is_k_prefix", "pass V as an array of its own");
  require(!options.earlier_kv_ready, "earlier_kv_ready", "leave it false: MLX orders the launches");
}

void require_policy(const Policy& policy) {
  const auto field = [](const char* name, std::int64_t value, std::int64_t allowed) {
    if (value == allowed) return;
    core::refuse(ErrorCode::InvalidArgument, name, std::to_string(value),
                 std::to_string(allowed) + " on the metal backend");
  };
  field("policy.prefetch_tokens", policy.prefetch_tokens, -1);
  field("policy.prefetch_lines", policy.prefetch_lines, 0);
  field("policy.prefetch_level", policy.prefetch_level, 0);
  field("policy.pair_dot", policy.pair_dot, -1);
  field("policy.worker_bytes", policy.worker_bytes, 0);
  field("policy.cluster", policy.cluster, -1);
  field("policy.join_blocks", policy.join_blocks, 0);
}

std::string prediction(const Decision& d, const Capabilities& gpu) {
  char text[256];
  std::snprintf(
      text, sizeof text,
      "%.1f us; a model fitted to twelve published points of an M5 Pro, never measured (%.1f issue slots per row "
      "and token; %s, %s)",
      d.predicted_us, static_cast<double>(d.slots) / 64.0,
      gpu.num_cores > 0 ? "scaled to this GPU's cores" : "as many cores as an M5 Pro",
      gpu.read_gbps > 0.0 ? "this GPU's read bandwidth" : "an M5 Pro's read bandwidth");
  return text;
}

void plan(core::PlanData& data, const PlanOptions& options) {
  const Capabilities gpu = capabilities(data.device);
  require_problem(data.problem, options);
  require_policy(options.policy);
  auto plan = std::make_shared<MetalPlan>();
  plan->decision = choose(data.problem, gpu, options.policy);
  const Decision& d = plan->decision;
  data.kernel_id = d.kernel_id;
  data.row_blocks = d.read_factor;
  data.max_chunks = d.num_chunks;
  data.workspace.total_bytes = static_cast<std::size_t>(d.workspace_bytes);
  data.rejected = d.rejected;
  data.prediction = prediction(d, gpu);
  Policy& policy = data.policy;
  policy = Policy();
  policy.body = static_cast<std::int64_t>(d.body);
  policy.row_tile = d.row_tile;
  policy.rows_per_worker = d.rows_per_worker;
  policy.chunk_tokens = d.chunk_tokens;
  policy.step_tokens = d.step_tokens;
  policy.splits = d.num_chunks;
  policy.simdgroups = d.threads / 32;
  data.backend_plan = std::move(plan);
}

}  // namespace

Device device(std::string_view target, int num_cores) {
  constexpr int kMostCores = 1024;
  if (family_of(target) == 0) {
    core::refuse(ErrorCode::InvalidArgument, "target", core::quoted(target),
                 "apple7 (M1), apple8 (M2), apple9 (M3, M4), apple10 (M5) and later families");
  }
  if (num_cores < 0 || num_cores > kMostCores) {
    core::refuse(ErrorCode::InvalidArgument, "num_cores", std::to_string(num_cores), "0 (unknown) to 1024");
  }
  Device device;
  device.backend = Backend::metal;
  device.target = std::string(target);
  device.num_sms = num_cores;
  return device;
}

const core::BackendTable& backend() {
  static constexpr core::BackendTable kTable = {Backend::metal, devices, plan, attend_nowhere, nowhere, nowhere};
  return kTable;
}

}  // namespace kvonce::metal
