#include "kvonce/bench_arms.hpp"

#include <fmt/format.h>

#include <limits>
#include <memory>

#include "shared/numeric.h"

namespace kvonce::tool {
namespace {

// float32 results of float32 sums; a bf16 cache may have its probabilities rounded to bf16 before the dot product.
double attention_tolerance(KvFormat format) { return format == KvFormat::bf16 ? 5e-3 : 2e-5; }

Arm kvonce_arm(const CaseData& data, const Device& device, const PlanOptions& options) {
  struct State {
    explicit State(Plan made) : plan(std::move(made)) {}
    Plan plan;
    std::vector<std::byte> workspace;
    std::vector<std::byte> out;
    Outputs outputs;
  };
  auto state = std::make_shared<State>(make_plan(data.problem, device, options));
  const Problem& problem = data.problem;
  const auto out_format = static_cast<KvFormat>(problem.out_dtype);  // the first three agree in order
  state->workspace.resize(state->plan.workspace_bytes());
  state->out.assign(
      static_cast<std::size_t>(format_bytes(out_format, static_cast<std::int64_t>(out_elements(problem)))),
      std::byte{0xff});  // NaN
  state->outputs.out = state->out.data();
  state->outputs.out_token_stride = problem.dim_v();
  state->outputs.out_head_stride = problem.q_len * problem.dim_v();
  state->outputs.out_seq_stride = problem.num_q_heads * problem.q_len * problem.dim_v();
  Arm arm;
  arm.kernel = std::string(state->plan.kernel_id());
  arm.read_factor = state->plan.read_factor();
  arm.run = [state, &data](std::int64_t set) {
    attend(state->plan, data.inputs(set), state->outputs, state->workspace.data(), state->workspace.size());
  };
  arm.error = [state, &data, out_format] {
    return sampled_error(data, decode_values(out_format, state->out.data(), out_elements(data.problem)));
  };
  arm.max_error = attention_tolerance(problem.k_format);
  return arm;
}

Arm per_head_arm(const CaseData& data, const bench::TargetKernels& kernels, bench::Team team,
                 std::int64_t prefetch_level) {
  struct State {
    bench::PerHead per_head;
    std::vector<float> out;
  };
  auto state = std::make_shared<State>(State{bench::PerHead(kernels, data.problem, team, prefetch_level), {}});
  state->out.assign(out_elements(data.problem), std::numeric_limits<float>::quiet_NaN());
  Arm arm;
  arm.kernel = state->per_head.kernel_id();
  arm.read_factor = state->per_head.read_factor();
  arm.run = [state, &data](std::int64_t set) { state->per_head.run(data.inputs(set), state->out.data()); };
  arm.error = [state, &data] { return sampled_error(data, state->out); };
  arm.max_error = attention_tolerance(data.problem.k_format);
  return arm;
}

Arm read_arm(const CaseData& data, const bench::TargetKernels& kernels, const bench::ReadLoop& loop, bench::Team team) {
  struct State {
    std::uint64_t sum = 0;
  };
  auto state = std::make_shared<State>();
  Arm arm;
  arm.kernel = fmt::format("read_{}_{}", kernels.target, loop.name);
  arm.run = [state, &data, loop, team](std::int64_t set) {
    state->sum = bench::run_read(loop, data.base + set * data.set_bytes, data.kv_bytes(), team);
  };
  arm.error = []() -> std::optional<double> { return std::nullopt; };
  return arm;
}

// Rows 0, middle and last of the product against double.
double qmv_error(const CaseData& data, const bench::Qmv& qmv) {
  const auto* const matrix = reinterpret_cast<const std::uint16_t*>(data.base);
  ErrorSum sum;
  for (const std::int64_t row : {std::int64_t{0}, qmv.num_rows() / 2, qmv.num_rows() - 1}) {
    double wanted = 0.0;
    for (std::int64_t col = 0; col < qmv.cols(row); ++col) {
      wanted += static_cast<double>(shared::f16_to_f32(matrix[row * bench::Qmv::kCols + col])) *
                static_cast<double>(qmv.x()[static_cast<std::size_t>(col)]);
    }
    sum.add(qmv.y()[static_cast<std::size_t>(row)], wanted);
  }
  return sum.relative_rms();
}

Arm qmv_arm(const CaseData& data, const bench::TargetKernels& kernels, bench::Team team) {
  auto qmv = std::make_shared<bench::Qmv>(kernels, data.kv_bytes(), team);
  if (qmv->num_rows() == 0) {
    throw Error(ErrorCode::Unsupported,
                "arm qmv: needs at least 128 bytes of K and V; leave it out with --arms kvonce");
  }
  Arm arm;
  arm.kernel = qmv->kernel_id();
  arm.run = [qmv, &data](std::int64_t set) {
    qmv->run(reinterpret_cast<const std::uint16_t*>(data.base + set * data.set_bytes));
  };
  arm.error = [qmv, &data] { return qmv_error(data, *qmv); };
  arm.max_error = 1e-4;
  return arm;
}

}  // namespace

const std::vector<std::string>& arm_names(Backend backend) {
  static const std::vector<std::string> cpu = {"kvonce", "per_head", "read", "qmv"};
  static const std::vector<std::string> cuda = {"kvonce", "per_head", "read", "qmv", "floor"};
  return backend == Backend::cuda ? cuda : cpu;
}

const std::vector<std::string>& planned_arm_names() {
  static const std::vector<std::string> names = {"kvonce_lens", "kvonce_planned"};
  return names;
}

const std::vector<std::string>& chain_arm_names() {
  static const std::vector<std::string> names = {"kvonce", "kvonce_early"};
  return names;
}

Arm make_arm(std::string_view name, const CaseData& data, const Device& device, const PlanOptions& options,
             const bench::TargetKernels& kernels, const bench::ReadLoop& read_loop) {
  const bench::Team team{device.num_threads};
  Arm arm;
  if (name == "kvonce") arm = kvonce_arm(data, device, options);
  if (name == "per_head") {
    arm = per_head_arm(data, kernels, team, make_plan(data.problem, device, options).policy().prefetch_level);
  }
  if (name == "read") arm = read_arm(data, kernels, read_loop, team);
  if (name == "qmv") arm = qmv_arm(data, kernels, team);
  arm.name = std::string(name);
  return arm;
}

}  // namespace kvonce::tool
