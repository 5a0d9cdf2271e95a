#include "kvonce/bench_cuda_arms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "baselines/cuda/kernels.hpp"
#include "baselines/cuda/status.hpp"
#include "core/reference.hpp"
#include "shared/numeric.h"

namespace kvonce::tool {
namespace {

using bench::cuda::require_success;

// 16-bit types: the probabilities are rounded to the type for the tensor cores, and so is the result.
double attention_tolerance(KvFormat format) { return format == KvFormat::f32 ? 2e-5 : 5e-3; }

CudaFinding judge(double error, double allowed) {
  CudaFinding finding;
  finding.rel_rms_error = error;
  if (!(error <= allowed)) {  // NaN too
    finding.wrong = fmt::format("relative RMS error {:.2e} against the oracle, allowed {:.0e}", error, allowed);
  }
  return finding;
}

// The result of an attention arm in device memory, packed, in the problem's out_dtype.
class CudaResult {
 public:
  explicit CudaResult(const Problem& problem)
      : format_(static_cast<KvFormat>(problem.out_dtype)),  // the first three agree in order
        count_(static_cast<std::int64_t>(out_elements(problem))),
        memory_(static_cast<std::size_t>(format_bytes(format_, count_))) {}

  [[nodiscard]] char* data() const { return memory_.data(); }
  [[nodiscard]] std::size_t bytes() const { return memory_.bytes(); }

  /// Every value becomes NaN.
  void poison(const CudaStream& stream) const {
    require_success(cudaMemsetAsync(memory_.data(), 0xff, memory_.bytes(), stream.get()), "clearing the result");
  }

  [[nodiscard]] std::vector<float> values() const {
    std::vector<std::byte> stored(memory_.bytes());
    copy_to_host(stored.data(), memory_.data(), stored.size());
    return decode_values(format_, stored.data(), static_cast<std::size_t>(count_));
  }

 private:
  KvFormat format_;
  std::int64_t count_;
  DeviceMemory memory_;
};

CudaFinding judge_result(const CudaCase& on_device, const CudaResult& result) {
  return judge(sampled_error(*on_device.host, result.values()), attention_tolerance(on_device.host->problem.k_format));
}

// The check of an arm that writes `result`.
std::function<CudaFinding()> attention_check(const CudaCase& on_device, const CudaResult& result,
                                             const CudaStream& stream, std::function<void(std::int64_t)> enqueue) {
  return [&on_device, &result, &stream, enqueue = std::move(enqueue)] {
    result.poison(stream);
    enqueue(0);
    stream.wait();
    return judge_result(on_device, result);
  };
}

bool is_planned(std::string_view name) { return name == "kvonce_planned"; }
bool has_lens(std::string_view name) { return name == "kvonce_lens" || is_planned(name); }
bool is_kvonce(std::string_view name) { return name == "kvonce" || name == "kvonce_early" || has_lens(name); }

// The plan of an arm of kvonce.
Plan kvonce_plan(std::string_view name, Problem problem, const BenchSettings& settings) {
  PlanOptions options = settings.plan;
  options.earlier_kv_ready = name == "kvonce_early";
  if (is_planned(name)) problem.max_kv_len = settings.planned_kv_len;
  return make_plan(problem, settings.device, options);
}

CudaArm kvonce_arm(std::string_view name, const CudaCase& on_device, const BenchSettings& settings,
                   const CudaStream& stream) {
  struct State {
    State(Plan made, const Problem& problem)
        : plan(std::move(made)), workspace(plan.workspace_bytes()), result(problem) {}
    Plan plan;
    DeviceMemory workspace;
    DeviceMemory kv_lens;  // nothing where the host knows them
    CudaResult result;
    Outputs outputs;
    Context context;
  };
  const Problem& problem = on_device.host->problem;
  auto state = std::make_shared<State>(kvonce_plan(name, problem, settings), problem);
  if (has_lens(name)) {
    const std::vector<std::int32_t> kv_lens(static_cast<std::size_t>(problem.num_seqs),
                                            static_cast<std::int32_t>(problem.max_kv_len));
    state->kv_lens.allocate(kv_lens.size() * sizeof(std::int32_t));
    copy_to_device(state->kv_lens.data(), kv_lens.data(), state->kv_lens.bytes());
  }
  state->outputs.out = state->result.data();
  state->outputs.out_token_stride = problem.dim_v();
  state->outputs.out_head_stride = problem.q_len * problem.dim_v();
  state->outputs.out_seq_stride = problem.num_q_heads * problem.q_len * problem.dim_v();
  state->context.cuda_stream = stream.get();
  prepare_workspace(state->plan, state->workspace.data(), state->workspace.bytes(), state->context);
  stream.wait();
  CudaArm arm;
  arm.label.kernel = std::string(state->plan.kernel_id());
  arm.label.read_factor = state->plan.read_factor();
  if (has_lens(name)) arm.planned_kv_len = state->plan.problem().max_kv_len;
  arm.out = state->result.data();
  arm.out_bytes = state->result.bytes();
  arm.enqueue = [state, &on_device](std::int64_t set) {
    Inputs inputs = on_device.inputs(set);
    inputs.kv_lens = reinterpret_cast<const std::int32_t*>(state->kv_lens.data());
    attend(state->plan, inputs, state->outputs, state->workspace.data(), state->workspace.bytes(), state->context);
  };
  arm.check = attention_check(on_device, state->result, stream, arm.enqueue);
  arm.judge_out = [state, &on_device] { return judge_result(on_device, state->result); };
  return arm;
}

CudaArm per_head_arm(const CudaCase& on_device, const CudaStream& stream) {
  struct State {
    explicit State(const Problem& problem)
        : per_head(problem), workspace(per_head.workspace_bytes()), result(problem) {}
    bench::cuda::PerHead per_head;
    DeviceMemory workspace;
    CudaResult result;
  };
  auto state = std::make_shared<State>(on_device.host->problem);
  CudaArm arm;
  arm.label.kernel = state->per_head.kernel_id();
  arm.label.read_factor = state->per_head.read_factor();
  arm.enqueue = [state, &on_device, &stream](std::int64_t set) {
    state->per_head.run(on_device.inputs(set), state->result.data(), state->workspace.data(), stream.get());
  };
  arm.check = attention_check(on_device, state->result, stream, arm.enqueue);
  return arm;
}

std::uint32_t xor_of_words(const char* data, std::int64_t bytes) {
  std::uint64_t sum = 0;
  for (std::int64_t at = 0; at + 8 <= bytes / 16 * 16; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, sizeof word);
    sum ^= word;
  }
  return static_cast<std::uint32_t>(sum ^ (sum >> 32));
}

CudaArm read_arm(const bench::cuda::ReadShape& shape, const CudaCase& on_device, const Device& device,
                 const CudaStream& stream) {
  auto sum = std::make_shared<DeviceMemory>(sizeof(std::uint32_t));
  const std::int64_t bytes = on_device.host->kv_bytes();
  const auto run = [=, &on_device, &stream](std::int64_t set, bool keep) {
    bench::cuda::run_read(shape, on_device.set_data(set), bytes, reinterpret_cast<std::uint32_t*>(sum->data()), keep,
                          device.num_sms, stream.get());
  };
  CudaArm arm;
  arm.label.kernel = bench::cuda::read_kernel_id(shape);
  arm.enqueue = [run](std::int64_t set) { run(set, false); };
  arm.check = [=, &on_device, &stream] {
    const std::uint32_t wanted = xor_of_words(on_device.host->base, bytes);
    std::uint32_t got = ~wanted;
    require_success(cudaMemsetAsync(sum->data(), 0, sizeof got, stream.get()), "clearing the sum");
    run(0, true);
    stream.wait();
    copy_to_host(&got, sum->data(), sizeof got);
    CudaFinding finding;
    if (got != wanted) finding.wrong = fmt::format("the xor of its bytes is {:#x}, must be {:#x}", got, wanted);
    return finding;
  };
  return arm;
}

CudaArm qmv_arm(const CudaCase& on_device, const Device& device, const CudaStream& stream) {
  struct State {
    std::int64_t bytes = 0;
    std::int64_t num_rows = 0;
    std::vector<float> x;
    DeviceMemory x_device;
    DeviceMemory y_device;
  };
  auto state = std::make_shared<State>();
  state->bytes = on_device.host->kv_bytes();
  state->num_rows = bench::cuda::qmv_rows(state->bytes);
  for (std::int64_t i = 0; i < bench::cuda::kQmvCols; ++i) {
    state->x.push_back(0.25F + static_cast<float>(i % 7) / 8.0F);
  }
  state->x_device.allocate(state->x.size() * sizeof(float));
  state->y_device.allocate(static_cast<std::size_t>(state->num_rows) * sizeof(float));
  copy_to_device(state->x_device.data(), state->x.data(), state->x_device.bytes());
  CudaArm arm;
  arm.label.kernel = "qmv_cuda_f16";
  arm.enqueue = [state, &on_device, &stream, num_sms = device.num_sms](std::int64_t set) {
    bench::cuda::run_qmv(on_device.set_data(set), state->bytes, reinterpret_cast<const float*>(state->x_device.data()),
                         reinterpret_cast<float*>(state->y_device.data()), num_sms, stream.get());
  };
  arm.check = [state, &on_device, &stream, enqueue = arm.enqueue] {
    require_success(cudaMemsetAsync(state->y_device.data(), 0xff, state->y_device.bytes(), stream.get()),
                    "clearing the result");
    enqueue(0);
    stream.wait();
    std::vector<float> y(static_cast<std::size_t>(state->num_rows));
    copy_to_host(y.data(), state->y_device.data(), state->y_device.bytes());
    const auto* const matrix = reinterpret_cast<const std::uint16_t*>(on_device.host->base);
    ErrorSum sum;
    for (const std::int64_t row : {std::int64_t{0}, state->num_rows / 2, state->num_rows - 1}) {
      double wanted = 0.0;
      for (std::int64_t col = 0; col < bench::cuda::qmv_cols(state->bytes, row); ++col) {
        wanted += static_cast<double>(shared::f16_to_f32(matrix[row * bench::cuda::kQmvCols + col])) *
                  static_cast<double>(state->x[static_cast<std::size_t>(col)]);
      }
      sum.add(y[static_cast<std::size_t>(row)], wanted);
    }
    return judge(sum.relative_rms(), 1e-4);
  };
  return arm;
}

// The blocks and the join of the plan that kvonce runs.
bench::cuda::FloorShape floor_shape(const CaseData& data, const Plan& plan) {
  const Problem& problem = data.problem;
  constexpr std::int64_t kMostShared = 96 * 1024;  // every device with clusters has it
  bench::cuda::FloorShape shape;
  shape.num_streams = problem.num_seqs * problem.num_kv_heads;
  shape.splits = plan.policy().splits;
  const std::int64_t places = plan.device().num_sms / 2;
  shape.join_blocks =
      std::clamp<std::int64_t>(plan.policy().join_blocks, 1, std::max<std::int64_t>(1, places / shape.num_streams));
  shape.elements = std::max<std::int64_t>(1, problem.rows_per_stream() * problem.dim_v() / 4);
  shape.cluster = plan.policy().cluster == 1 && shape.elements * 16 <= kMostShared;
  shape.stream_vectors = data.kv_bytes() / shape.num_streams / 16;
  return shape;
}

CudaArm floor_arm(const bench::cuda::FloorShape& shape, const CudaCase& on_device, const CudaStream& stream) {
  struct State {
    DeviceMemory workspace;
    DeviceMemory out;
  };
  auto state = std::make_shared<State>();
  const auto count = static_cast<std::size_t>(4 * shape.num_streams * shape.elements);
  state->workspace.allocate(bench::cuda::floor_workspace_bytes(shape));
  state->out.allocate(count * sizeof(float));
  require_success(cudaMemsetAsync(state->workspace.data(), 0, state->workspace.bytes(), stream.get()), "clearing");
  stream.wait();
  CudaArm arm;
  arm.label.kernel = bench::cuda::floor_kernel_id(shape);
  arm.enqueue = [=, &on_device, &stream](std::int64_t set) {
    bench::cuda::run_floor(shape, on_device.set_data(set), state->out.data(), state->workspace.data(), stream.get());
  };
  arm.check = [=, &stream, enqueue = arm.enqueue] {
    require_success(cudaMemsetAsync(state->out.data(), 0xff, state->out.bytes(), stream.get()), "clearing the result");
    enqueue(0);
    stream.wait();
    std::vector<float> out(count);
    copy_to_host(out.data(), state->out.data(), state->out.bytes());
    const auto low = static_cast<float>(shape.splits);
    CudaFinding finding;
    const auto wrong = std::find_if(out.begin(), out.end(), [low](float x) { return !(x >= low && x <= 2.0F * low); });
    if (wrong != out.end()) {
      finding.wrong = fmt::format("a word of its result is {}, must be from {} to {}", *wrong, low, 2.0F * low);
    }
    return finding;
  };
  return arm;
}

}  // namespace

Inputs CudaCase::inputs(std::int64_t set) const {
  CaseData layout;
  layout.problem = host->problem;
  layout.tokens_first = host->tokens_first;
  layout.k_bytes = host->k_bytes;
  layout.v_bytes = host->v_bytes;
  layout.set_bytes = host->set_bytes;
  layout.base = base;
  Inputs inputs = layout.inputs(set);
  inputs.q.data = q.data();
  return inputs;
}

void require_servable(std::string_view name, const Problem& problem, const BenchSettings& settings) {
  if (name == "per_head") (void)bench::cuda::PerHead(problem);
  if (name == "qmv" && bench::cuda::qmv_rows(lay_out_case(problem, 0).kv_bytes()) == 0) {
    throw Error(ErrorCode::Unsupported, "arm qmv: needs at least 16 bytes of K and V; leave it out with --arms kvonce");
  }
  if (!is_kvonce(name) && name != "floor") return;
  (void)kvonce_plan(name, problem, settings);
  constexpr std::int64_t kMaxGridY = 65535;
  if (name == "floor" && problem.num_seqs * problem.num_kv_heads > kMaxGridY) {
    throw Error(ErrorCode::Unsupported,
                "arm floor: serves up to 65535 sequences times KV heads; leave it out with --arms");
  }
}

std::vector<CudaArm> make_cuda_arms(std::string_view name, const CudaCase& on_device, const BenchSettings& settings,
                                    const CudaStream& stream) {
  const Device& device = settings.device;
  std::vector<CudaArm> arms;
  if (is_kvonce(name)) arms.push_back(kvonce_arm(name, on_device, settings, stream));
  if (name == "per_head") arms.push_back(per_head_arm(on_device, stream));
  if (name == "qmv") arms.push_back(qmv_arm(on_device, device, stream));
  if (name == "read") {
    for (const bench::cuda::ReadShape& shape : bench::cuda::read_shapes()) {
      arms.push_back(read_arm(shape, on_device, device, stream));
    }
  }
  if (name == "floor") {
    bench::cuda::FloorShape shape = floor_shape(*on_device.host, kvonce_plan(name, on_device.host->problem, settings));
    for (const int threads : {256, 512}) {
      shape.threads = threads;
      arms.push_back(floor_arm(shape, on_device, stream));
    }
  }
  for (CudaArm& arm : arms) arm.label.name = std::string(name);
  return arms;
}

}  // namespace kvonce::tool
