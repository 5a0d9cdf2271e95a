// kvonce run: attention over the q, k and v of a safetensors file.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "kvonce/attend.hpp"
#include "kvonce/case_string.hpp"
#include "kvonce/commands.hpp"
#include "kvonce/device_options.hpp"
#include "kvonce/output.hpp"
#include "kvonce/run_check.hpp"
#include "kvonce/safetensors.hpp"

namespace kvonce::tool {
namespace {

constexpr int kCheckFailed = 1;

// The header's entries of the tensors that attention needs.
struct RunTensors {
  const TensorInfo* q = nullptr;
  const TensorInfo* k = nullptr;
  const TensorInfo* v = nullptr;
  // May stay null:
  const TensorInfo* kv_lens = nullptr;
  const TensorInfo* mask = nullptr;
  const TensorInfo* sinks = nullptr;
  const TensorInfo* alibi_slopes = nullptr;
};

struct RunInputs {
  Inputs inputs;
  std::vector<AlignedBytes> storage;  // what `inputs` points into
};

struct RunOutputs {
  AlignedBytes out;
  std::vector<float> lse;
  double us_median = 0.0;
};

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::InvalidArgument, message); }

const TensorInfo& require_tensor(const SafetensorsHeader& header, std::string_view name, std::string_view shape) {
  const TensorInfo* tensor = header.find(name);
  if (tensor == nullptr) refuse(fmt::format("--input: has no tensor '{}' {}", name, shape));
  constexpr std::size_t kRank = 4;
  if (tensor->shape.size() != kRank) {
    refuse(fmt::format("--input: tensor '{}' must have the 4 axes {}, got [{}]", name, shape,
                       fmt::join(tensor->shape, ", ")));
  }
  for (const std::uint64_t extent : tensor->shape) {
    if (extent > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max())) {
      refuse(fmt::format("--input: tensor '{}' must have axes below 2^31, got [{}]", name,
                         fmt::join(tensor->shape, ", ")));
    }
  }
  return *tensor;
}

DType plain_dtype(const TensorInfo& tensor) {
  if (tensor.dtype == "F32") return DType::f32;
  if (tensor.dtype == "F16") return DType::f16;
  if (tensor.dtype == "BF16") return DType::bf16;
  refuse(fmt::format("--input: tensor '{}' must be F32, F16 or BF16, got {}", tensor.name, tensor.dtype));
}

std::int64_t axis(const TensorInfo& tensor, std::size_t idx) { return static_cast<std::int64_t>(tensor.shape[idx]); }

void require_axis(const TensorInfo& tensor, std::size_t idx, std::string_view name, std::int64_t expected,
                  std::string_view source) {
  if (axis(tensor, idx) == expected) return;
  refuse(fmt::format("--input: tensor '{}' must have {} = {} as '{}' has, got [{}]", tensor.name, name, expected,
                     source, fmt::join(tensor.shape, ", ")));
}

// Rows of head_dim values, head after head, sequence after sequence.
TensorView packed_view(const TensorInfo& tensor, const AlignedBytes& bytes) {
  TensorView view;
  view.data = bytes.data();
  view.token_stride = axis(tensor, 3);
  view.head_stride = axis(tensor, 2) * view.token_stride;
  view.seq_stride = axis(tensor, 1) * view.head_stride;
  return view;
}

Problem problem_of(const RunTensors& tensors, const RunOptions& options) {
  const TensorInfo& q = *tensors.q;
  const TensorInfo& k = *tensors.k;
  const TensorInfo& v = *tensors.v;

  require_axis(k, 0, "num_seqs", axis(q, 0), "q");
  require_axis(k, 3, "head_dim_qk", axis(q, 3), "q");
  require_axis(v, 0, "num_seqs", axis(q, 0), "q");
  require_axis(v, 1, "num_kv_heads", axis(k, 1), "k");
  require_axis(v, 2, "kv_len", axis(k, 2), "k");
  const DType q_dtype = plain_dtype(q);
  const DType kv_dtype = plain_dtype(k);
  if (plain_dtype(v) != kv_dtype) {
    refuse(fmt::format("--input: tensor 'v' must have the dtype of 'k' ({}), got {}", k.dtype, v.dtype));
  }
  if (axis(v, 3) == 0) refuse("--input: tensor 'v' must have head_dim_v from 1 to 1024, got 0");
  Problem problem;
  problem.num_seqs = axis(q, 0);
  problem.num_q_heads = axis(q, 1);
  problem.q_len = axis(q, 2);
  problem.head_dim_qk = axis(q, 3);
  problem.num_kv_heads = axis(k, 1);
  problem.max_kv_len = axis(k, 2);
  problem.head_dim_v = axis(v, 3);
  problem.q_dtype = q_dtype;
  problem.out_dtype = q_dtype;
  problem.k_format = static_cast<KvFormat>(kv_dtype);  // the plain formats agree with DType in order
  problem.v_format = problem.k_format;
  problem.causal = options.causal;
  if (options.scale) problem.scale = static_cast<float>(*options.scale);
  problem.softcap = static_cast<float>(options.softcap);
  problem.has_sinks = tensors.sinks != nullptr;
  problem.has_alibi = tensors.alibi_slopes != nullptr;
  if (tensors.mask != nullptr) {
    const bool boolean = tensors.mask->dtype == "BOOL" || tensors.mask->dtype == "U8";
    problem.mask = boolean ? MaskKind::boolean : MaskKind::additive;
    if (!boolean) problem.mask_dtype = plain_dtype(*tensors.mask);
  }
  return problem;
}

SafetensorsFile open_input(const std::string& path) {
  try {
    return SafetensorsFile(path);
  } catch (const Error& error) {
    refuse(fmt::format("--input: {}", error.what()));
  }
}

const TensorInfo* find_per_head(const SafetensorsHeader& header, std::string_view name, std::uint64_t num_q_heads) {
  const TensorInfo* tensor = header.find(name);
  if (tensor != nullptr && (tensor->dtype != "F32" || tensor->shape != std::vector<std::uint64_t>{num_q_heads})) {
    refuse(fmt::format("--input: tensor '{}' must be F32 [{}], got {} [{}]", name, num_q_heads, tensor->dtype,
                       fmt::join(tensor->shape, ", ")));
  }
  return tensor;
}

const TensorInfo& require_mask(const SafetensorsHeader& header, const RunTensors& tensors) {
  const TensorInfo& mask = require_tensor(header, "mask", "[num_seqs, num_q_heads, q_len, kv_len]");
  for (std::size_t idx = 0; idx < 3; ++idx) {
    if (mask.shape[idx] == 1 || mask.shape[idx] == tensors.q->shape[idx]) continue;
    refuse(fmt::format("--input: tensor 'mask' must have 1 or {} at axis {} as 'q' has, got [{}]",
                       tensors.q->shape[idx], idx, fmt::join(mask.shape, ", ")));
  }
  require_axis(mask, 3, "kv_len", axis(*tensors.k, 2), "k");
  if (mask.dtype != "BOOL" && mask.dtype != "U8") (void)plain_dtype(mask);
  return mask;
}

RunTensors find_tensors(const SafetensorsHeader& header) {
  RunTensors tensors;
  tensors.q = &require_tensor(header, "q", "[num_seqs, num_q_heads, q_len, head_dim_qk]");
  tensors.k = &require_tensor(header, "k", "[num_seqs, num_kv_heads, kv_len, head_dim_qk]");
  tensors.v = &require_tensor(header, "v", "[num_seqs, num_kv_heads, kv_len, head_dim_v]");
  tensors.kv_lens = header.find("kv_lens");
  tensors.sinks = find_per_head(header, "sinks", tensors.q->shape[1]);
  tensors.alibi_slopes = find_per_head(header, "alibi_slopes", tensors.q->shape[1]);
  if (header.find("mask") != nullptr) tensors.mask = &require_mask(header, tensors);
  const std::uint64_t num_seqs = tensors.q->shape[0];
  const TensorInfo* lens = tensors.kv_lens;
  if (lens != nullptr && (lens->dtype != "I32" || lens->shape != std::vector<std::uint64_t>{num_seqs})) {
    refuse(fmt::format("--input: tensor 'kv_lens' must be I32 [{}], got {} [{}]", num_seqs, lens->dtype,
                       fmt::join(lens->shape, ", ")));
  }
  return tensors;
}

RunInputs read_inputs(const SafetensorsFile& file, const RunTensors& tensors) {
  RunInputs run;
  for (const TensorInfo* tensor : {tensors.q, tensors.k, tensors.v}) run.storage.push_back(file.read(*tensor));
  run.inputs.q = packed_view(*tensors.q, run.storage[0]);
  run.inputs.k = packed_view(*tensors.k, run.storage[1]);
  run.inputs.v = packed_view(*tensors.v, run.storage[2]);
  if (tensors.kv_lens != nullptr) {
    run.storage.push_back(file.read(*tensors.kv_lens));
    run.inputs.kv_lens = reinterpret_cast<const std::int32_t*>(run.storage.back().data());
  }
  const auto read_floats = [&](const TensorInfo* tensor, const float*& floats) {
    if (tensor == nullptr) return;
    run.storage.push_back(file.read(*tensor));
    floats = reinterpret_cast<const float*>(run.storage.back().data());
  };
  read_floats(tensors.sinks, run.inputs.sinks);
  read_floats(tensors.alibi_slopes, run.inputs.alibi_slopes);
  if (tensors.mask != nullptr) {
    run.storage.push_back(file.read(*tensors.mask));
    const TensorInfo& mask = *tensors.mask;
    const auto stride = [&mask](std::size_t idx, std::int64_t elements) { return mask.shape[idx] == 1 ? 0 : elements; };
    run.inputs.mask = run.storage.back().data();
    run.inputs.mask_row_stride = stride(2, axis(mask, 3));
    run.inputs.mask_head_stride = stride(1, axis(mask, 2) * axis(mask, 3));
    run.inputs.mask_seq_stride = stride(0, axis(mask, 1) * axis(mask, 2) * axis(mask, 3));
  }
  return run;
}

// Runs once for the result, then again for the time: the median of up to 50 calls within about a tenth of a second.
RunOutputs compute(const Plan& plan, const RunInputs& run) {
  const Problem& problem = plan.problem();
  const std::int64_t num_rows = problem.num_seqs * problem.num_q_heads * problem.q_len;
  const std::int64_t element_bytes = problem.out_dtype == DType::f32 ? 4 : 2;
  RunOutputs result;
  result.out = AlignedBytes(static_cast<std::size_t>(num_rows * problem.dim_v() * element_bytes));
  result.lse.resize(static_cast<std::size_t>(std::max<std::int64_t>(num_rows, 1)));
  Outputs outputs;
  outputs.out = result.out.data();
  outputs.out_token_stride = problem.dim_v();
  outputs.out_head_stride = problem.q_len * outputs.out_token_stride;
  outputs.out_seq_stride = problem.num_q_heads * outputs.out_head_stride;
  outputs.lse = result.lse.data();
  outputs.lse_token_stride = 1;
  outputs.lse_head_stride = problem.q_len;
  outputs.lse_seq_stride = problem.num_q_heads * problem.q_len;

  using Clock = std::chrono::steady_clock;
  AlignedBytes workspace(plan.workspace_bytes());
  attend(plan, run.inputs, outputs, workspace.data(), workspace.size());
  constexpr std::size_t kMaxCalls = 50;
  constexpr std::chrono::milliseconds kBudget{100};
  std::vector<double> times_us;
  const Clock::time_point begin = Clock::now();
  do {
    const Clock::time_point call_begin = Clock::now();
    attend(plan, run.inputs, outputs, workspace.data(), workspace.size());
    times_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - call_begin).count());
  } while (times_us.size() < kMaxCalls && Clock::now() - begin < kBudget);
  std::sort(times_us.begin(), times_us.end());
  result.us_median = times_us[times_us.size() / 2];
  return result;
}

void write_result(const RunOptions& options, const Problem& problem, const RunOutputs& result, const Plan& plan) {
  constexpr std::array kNames = {"F32", "F16", "BF16"};  // in DType's order
  const std::vector<std::uint64_t> rows = {static_cast<std::uint64_t>(problem.num_seqs),
                                           static_cast<std::uint64_t>(problem.num_q_heads),
                                           static_cast<std::uint64_t>(problem.q_len)};
  std::vector<std::uint64_t> out_shape = rows;
  out_shape.push_back(static_cast<std::uint64_t>(problem.dim_v()));
  std::vector<TensorToWrite> tensors;
  const auto dtype_idx = static_cast<std::size_t>(problem.out_dtype);
  tensors.push_back({"out", kNames.at(dtype_idx), out_shape, {result.out.data(), result.out.size()}});
  if (options.lse) {
    const std::size_t num_rows = static_cast<std::size_t>(rows[0] * rows[1] * rows[2]);
    tensors.push_back({"lse", "F32", rows, std::as_bytes(std::span(result.lse.data(), num_rows))});
  }
  try {
    write_safetensors(options.out, tensors,
                      {{"kvonce_version", std::string(version())}, {"kernel", std::string(plan.kernel_id())}});
  } catch (const Error& error) {
    refuse(fmt::format("--out: {}", error.what()));
  }
}

CaseSpec case_of(const Problem& problem) {
  CaseSpec spec;
  spec.num_q_heads = problem.num_q_heads;
  spec.num_kv_heads = problem.num_kv_heads;
  spec.head_dim_qk = problem.head_dim_qk;
  spec.head_dim_v = problem.dim_v();
  spec.kv_len = problem.max_kv_len;
  spec.q_len = problem.q_len;
  spec.num_seqs = problem.num_seqs;
  spec.dtype = problem.k_format;
  spec.causal = problem.causal;
  spec.mask = problem.mask;
  spec.softcap = problem.softcap;
  spec.alibi = problem.has_alibi;
  spec.sinks = problem.has_sinks;
  return spec;
}

std::string describe(const Plan& plan, const RunOutputs& result, const std::optional<CheckResult>& check) {
  std::string text = fmt::format("case    {}\nkernel  {}, read factor {}, {} threads\ntime    {:.1f} us\n",
                                 to_string(case_of(plan.problem())), plan.kernel_id(), plan.read_factor(),
                                 plan.device().num_threads, result.us_median);
  if (check) {
    text += fmt::format("check   relative RMS error {:.2e} (allowed {:.2e}), max error {:.2e}, lse error {:.2e}: {}\n",
                        check->rel_rms_error, check->tolerance, check->max_error, check->max_lse_error,
                        check->passed ? "passed" : "FAILED");
  }
  return text;
}

Table tabulate(const Plan& plan, const RunOutputs& result, const std::optional<CheckResult>& check) {
  Table table;
  table.columns = {"case", "kernel", "read_factor", "threads", "us_median"};
  table.rows.push_back({to_string(case_of(plan.problem())), std::string(plan.kernel_id()), plan.read_factor(),
                        plan.device().num_threads, result.us_median});
  if (check) {
    for (const char* name : {"rel_rms_error", "tolerance", "max_error", "max_lse_error", "passed"}) {
      table.columns.emplace_back(name);
    }
    auto& row = table.rows.front();
    for (const double value : {check->rel_rms_error, check->tolerance, check->max_error, check->max_lse_error}) {
      row.emplace_back(value);
    }
    row.emplace_back(check->passed);
  }
  return table;
}

}  // namespace

int run_file(const RunOptions& options) {
  if (options.out.empty() && !options.check) refuse("--out: is required unless --check is given");
  if (options.scale && !std::isfinite(static_cast<float>(*options.scale))) {
    refuse(fmt::format("--scale: must be finite in float32, got {}", *options.scale));
  }
  const Device device = choose_device(options.device);
  const PlanOptions plan_choices = plan_options(options.device);
  const SafetensorsFile file = open_input(options.input);
  const RunTensors tensors = find_tensors(file.header());
  const Plan plan = make_plan(problem_of(tensors, options), device, plan_choices);
  const RunInputs run = read_inputs(file, tensors);
  const RunOutputs result = compute(plan, run);
  std::optional<CheckResult> check;
  if (options.check) check = check_against_oracle(plan.problem(), run.inputs, result.out.data(), result.lse.data());
  if (!options.out.empty()) write_result(options, plan.problem(), result, plan);
  print(options.format ? render(tabulate(plan, result, check), *options.format) : describe(plan, result, check));
  return check && !check->passed ? kCheckFailed : 0;
}

}  // namespace kvonce::tool
