#include "kvonce/bench_arms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "core/reference.hpp"
#include "shared/numeric.h"

namespace kvonce::tool {
namespace {

constexpr std::int64_t kSetAlignment = 4096;

// Sum of squared differences over sum of squares.
struct ErrorSum {
  double difference = 0.0;
  double total = 0.0;

  void add(double got, double wanted) {
    difference += (got - wanted) * (got - wanted);
    total += wanted * wanted;
  }
  [[nodiscard]] double relative_rms() const {
    if (total > 0.0) return std::sqrt(difference / total);
    return difference == 0.0 ? 0.0 : std::numeric_limits<double>::infinity();
  }
};

// The oracle for one row of a case: a problem with one head and one query token that ends where the row's keys end.
std::vector<double> reference_row(const Problem& problem, const Inputs& inputs, std::int64_t seq, std::int64_t head,
                                  std::int64_t query_idx) {
  Problem row = problem;
  row.num_seqs = row.q_len = row.num_q_heads = row.num_kv_heads = 1;
  if (problem.causal) row.max_kv_len = std::max<std::int64_t>(0, problem.max_kv_len - problem.q_len + 1 + query_idx);
  const auto advance = [](TensorView& view, std::int64_t elements, std::int64_t element_bytes) {
    view.data = static_cast<const char*>(view.data) + elements * element_bytes;
  };
  const std::int64_t kv_head = head / problem.group_size();
  Inputs at = inputs;
  advance(at.q, seq * at.q.seq_stride + head * at.q.head_stride + query_idx * at.q.token_stride,
          problem.q_dtype == DType::f32 ? 4 : 2);
  advance(at.k, seq * at.k.seq_stride + kv_head * at.k.head_stride, format_bytes(problem.k_format, 1));
  advance(at.v, seq * at.v.seq_stride + kv_head * at.v.head_stride, format_bytes(problem.v_format, 1));
  return core::reference_attend(row, at).out;
}

double sampled_error(const CaseData& data, const std::vector<float>& out) {
  const Problem& problem = data.problem;
  ErrorSum sum;
  for (const OracleRow& row : data.oracle_rows) {
    const std::int64_t row_idx = (row.seq * problem.num_q_heads + row.head) * problem.q_len + row.query_idx;
    const float* const got = out.data() + row_idx * problem.dim_v();
    for (std::size_t d = 0; d < row.out.size(); ++d) sum.add(got[d], row.out[d]);
  }
  return sum.relative_rms();
}

// float32 results of float32 sums; a bf16 cache may have its probabilities rounded to bf16 before the dot product.
double attention_tolerance(KvFormat format) { return format == KvFormat::bf16 ? 5e-3 : 2e-5; }

std::size_t out_elements(const Problem& problem) {
  return static_cast<std::size_t>(problem.num_seqs * problem.num_q_heads * problem.q_len * problem.dim_v());
}

Arm kvonce_arm(const CaseData& data, const Device& device, const PlanOptions& options) {
  struct State {
    explicit State(Plan made) : plan(std::move(made)) {}
    Plan plan;
    std::vector<std::byte> workspace;
    std::vector<float> out;
    Outputs outputs;
  };
  auto state = std::make_shared<State>(make_plan(data.problem, device, options));
  const Problem& problem = data.problem;
  state->workspace.resize(state->plan.workspace_bytes());
  state->out.assign(out_elements(problem), std::numeric_limits<float>::quiet_NaN());
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
  arm.error = [state, &data] { return sampled_error(data, state->out); };
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

TensorView packed_view(const void* data, std::int64_t heads, std::int64_t tokens, std::int64_t dims) {
  return {data, heads * tokens * dims, tokens * dims, dims};
}

}  // namespace

const std::vector<std::string>& arm_names() {
  static const std::vector<std::string> names = {"kvonce", "per_head", "read", "qmv"};
  return names;
}

Inputs CaseData::inputs(std::int64_t set) const {
  Inputs inputs;
  const char* const k = base + set * set_bytes;
  inputs.q = packed_view(q.data(), problem.num_q_heads, problem.q_len, problem.head_dim_qk);
  inputs.k = packed_view(k, problem.num_kv_heads, problem.max_kv_len, problem.head_dim_qk);
  inputs.v = packed_view(k + k_bytes, problem.num_kv_heads, problem.max_kv_len, problem.dim_v());
  if (tokens_first) {
    inputs.k.head_stride = problem.head_dim_qk;
    inputs.k.token_stride = problem.num_kv_heads * problem.head_dim_qk;
    inputs.v.head_stride = problem.dim_v();
    inputs.v.token_stride = problem.num_kv_heads * problem.dim_v();
  }
  return inputs;
}

CaseData lay_out_case(const Problem& problem, std::int64_t rotation_bytes) {
  CaseData data;
  data.problem = problem;
  const std::int64_t tokens = problem.num_seqs * problem.num_kv_heads * problem.max_kv_len;
  data.k_bytes = format_bytes(problem.k_format, tokens * problem.head_dim_qk);
  data.v_bytes = format_bytes(problem.v_format, tokens * problem.dim_v());
  data.set_bytes = std::max((data.kv_bytes() + kSetAlignment - 1) / kSetAlignment * kSetAlignment, kSetAlignment);
  // An odd number of sets: every arm of an even number of them meets every set.
  data.num_sets = std::max<std::int64_t>(1, (rotation_bytes + data.set_bytes - 1) / data.set_bytes);
  if (data.num_sets > 1) data.num_sets |= 1;
  return data;
}

void place_case(CaseData& data, const BenchBuffer& buffer) {
  data.base = buffer.data();
  const Problem& problem = data.problem;
  const std::int64_t elements = problem.num_seqs * problem.num_q_heads * problem.q_len * problem.head_dim_qk;
  const auto format = static_cast<KvFormat>(problem.q_dtype);  // the first three agree in order
  const std::int64_t bytes = (format_bytes(format, elements) + 3) / 4 * 4;
  data.q.resize(static_cast<std::size_t>(bytes));
  fill_random(data.q.data(), bytes, format, 0);

  // Rows that touch the ends and the middle of every axis.
  data.oracle_rows = {{0, 0, problem.q_len - 1, {}},
                      {problem.num_seqs - 1, problem.num_q_heads - 1, 0, {}},
                      {problem.num_seqs / 2, problem.num_q_heads / 2, problem.q_len / 2, {}}};
  const Inputs inputs = data.inputs(0);
  for (OracleRow& row : data.oracle_rows) row.out = reference_row(problem, inputs, row.seq, row.head, row.query_idx);
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
