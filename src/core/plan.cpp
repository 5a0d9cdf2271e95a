#include "core/plan_data.hpp"

#include <utility>

#include "core/backend.hpp"
#include "core/policy_choice.hpp"
#include "core/refuse.hpp"
#include "core/validate.hpp"
#include "shared/token_range.h"

namespace kvonce {

Plan make_plan(const Problem& problem, const Device& device, const PlanOptions& options) {
  auto data = std::make_shared<core::PlanData>();
  data->problem = core::validate(problem);
  data->device = device;
  if (device.num_threads < 1 || device.num_threads > core::kMaxThreads) {
    core::refuse(ErrorCode::InvalidArgument, "device.num_threads", std::to_string(device.num_threads),
                 "1 to " + std::to_string(core::kMaxThreads));
  }
  if (!device.unavailable.empty()) throw Error(ErrorCode::Unavailable, device.unavailable);

  PlanOptions resolved = options;
  if (resolved.chunk_tokens != 0) {
    if (resolved.policy.chunk_tokens != 0 && resolved.policy.chunk_tokens != resolved.chunk_tokens) {
      core::refuse(ErrorCode::InvalidArgument, "chunk_tokens", std::to_string(resolved.chunk_tokens),
                   "the same value as policy.chunk_tokens = " + std::to_string(resolved.policy.chunk_tokens));
    }
    resolved.policy.chunk_tokens = resolved.chunk_tokens;
  }
  data->backend = &core::backend_table(device.backend);
  data->rows_per_stream = data->problem.rows_per_stream();
  const Policy asked = resolved.policy;
  const core::PolicyChoice choice = core::choose_policy(asked, options.policy_file.get(), data->problem, data->device);
  resolved.policy = choice.policy;
  data->policy_origin = choice.origin;
  try {
    data->backend->plan(*data, resolved);
  } catch (const Error& error) {
    throw Error(error.code(), core::with_policy_line(choice, asked, error.what()));
  }
  return Plan(std::move(data));
}

Plan make_plan(const Problem& problem) { return make_plan(problem, default_device()); }

const Problem& Plan::problem() const noexcept { return data_->problem; }
const Device& Plan::device() const noexcept { return data_->device; }
const Policy& Plan::policy() const noexcept { return data_->policy; }
std::string_view Plan::kernel_id() const noexcept { return data_->kernel_id; }
std::int64_t Plan::read_factor() const noexcept { return data_->row_blocks; }
std::int64_t Plan::max_chunks() const noexcept { return data_->max_chunks; }
std::size_t Plan::workspace_bytes() const noexcept { return data_->workspace.total_bytes; }

std::int64_t core::token_kv_bytes(const Problem& p) {
  const auto row_bytes = [&p](KvFormat format, std::int64_t dims) {
    const bool is_mlx = format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4;
    const std::int64_t levels = is_mlx ? 2 * dims / p.quant_group : 0;  // scales and biases
    return format_bytes(format, dims) + format_bytes(static_cast<KvFormat>(p.scales_dtype), levels);
  };
  return row_bytes(p.k_format, p.head_dim_qk) + (p.v_is_k_prefix ? 0 : row_bytes(p.v_format, p.head_dim_v));
}

std::int64_t core::max_kv_bytes(const Problem& p) {
  // Saturates: the largest legal problem exceeds 64 bits of bytes.
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(p.num_seqs * p.num_kv_heads, p.max_kv_len, &bytes) ||
      __builtin_mul_overflow(bytes, token_kv_bytes(p), &bytes)) {
    return INT64_MAX;
  }
  return bytes;
}

std::int64_t Plan::max_kv_bytes() const noexcept { return core::max_kv_bytes(data_->problem); }

namespace {

void require_workspace(const core::PlanData& data, const void* workspace, std::size_t workspace_bytes) {
  if (workspace_bytes < data.workspace.total_bytes || (workspace == nullptr && data.workspace.total_bytes > 0)) {
    core::refuse(ErrorCode::InvalidArgument, "workspace_bytes",
                 workspace == nullptr ? "a null workspace" : std::to_string(workspace_bytes),
                 "at least plan.workspace_bytes() = " + std::to_string(data.workspace.total_bytes));
  }
}

}  // namespace

void attend(const Plan& plan, const Inputs& inputs, const Outputs& outputs, void* workspace,
            std::size_t workspace_bytes, const Context& context) {
  const core::PlanData& data = plan.data();
  core::validate_inputs(data.problem, inputs);
  if (data.device.backend != Backend::cuda) core::validate_lengths(data.problem, inputs);
  core::validate_outputs(data.problem, outputs);
  require_workspace(data, workspace, workspace_bytes);
  if (context.num_threads < 0 || context.num_threads > data.device.num_threads) {
    core::refuse(ErrorCode::InvalidArgument, "context.num_threads", std::to_string(context.num_threads),
                 "0 to the plan's device.num_threads = " + std::to_string(data.device.num_threads));
  }
  data.backend->attend(data, inputs, outputs, workspace, context);
}

void prepare_workspace(const Plan& plan, void* workspace, std::size_t workspace_bytes, const Context& context) {
  const core::PlanData& data = plan.data();
  require_workspace(data, workspace, workspace_bytes);
  if (data.backend->prepare_workspace != nullptr) data.backend->prepare_workspace(data, workspace, context);
}

void check_workspace(const Plan& plan, void* workspace, std::size_t workspace_bytes, const Context& context) {
  const core::PlanData& data = plan.data();
  require_workspace(data, workspace, workspace_bytes);
  if (data.backend->check_workspace != nullptr) data.backend->check_workspace(data, workspace, context);
}

}  // namespace kvonce
