// kvonce explain: the plan for a case string.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "baselines/baselines.hpp"
#include "kvonce/bench_buffer.hpp"
#include "kvonce/case_string.hpp"
#include "kvonce/commands.hpp"
#include "kvonce/device_options.hpp"
#include "kvonce/output.hpp"
#include "kvonce/plan.hpp"

namespace kvonce::tool {
namespace {

DType plain_dtype(const std::string& name) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (to_string(dtype) == name) return dtype;
  }
  throw Error(ErrorCode::InvalidArgument, fmt::format("--q-dtype: must be f32, f16 or bf16, got '{}'", name));
}

// Streams 256 MB, or four times the last-level cache, with each of the target's read loops. About half a second.
double measure_read_gbps(const Device& device) {
  constexpr int kRounds = 3;
  const bench::Team team{device.num_threads};
  const std::int64_t bytes = std::max<std::int64_t>(256LL << 20, 4 * device.l3_bytes);
  BenchBuffer buffer;
  buffer.prepare(bytes, KvFormat::f16, team);
  double best_s = 0.0;
  for (int round = 0; round < kRounds; ++round) {
    for (const bench::ReadLoop& loop : bench::target_kernels(device.target).read_loops) {
      const auto start = std::chrono::steady_clock::now();
      bench::run_read(loop, buffer.data(), bytes, team);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (best_s == 0.0 || seconds < best_s) best_s = seconds;
    }
  }
  return static_cast<double>(bytes) / best_s * 1e-9;
}

}  // namespace

void run_explain(const ExplainOptions& options) {
  const CaseSpec spec = parse_case(options.case_text);
  const std::optional<KvFormat> format = parse_format(options.dtype);
  if (!format) {
    throw Error(ErrorCode::InvalidArgument,
                fmt::format("--dtype: must be one of {}, got '{}'", format_names(), options.dtype));
  }
  const KvFormat kv_format = spec.dtype.value_or(*format);
  const DType q_dtype = options.q_dtype.empty() ? default_q_dtype(kv_format) : plain_dtype(options.q_dtype);
  const Problem problem = to_problem(spec, kv_format, q_dtype);
  Device device = choose_device(options.device);
  make_plan(problem, device, plan_options(options.device));  // refuses before the measurement
  if (device.backend == Backend::cpu) device.read_gbps = measure_read_gbps(device);
  std::string text = make_plan(problem, device, plan_options(options.device)).explain();
  if (!text.ends_with('\n')) text += '\n';
  print(text);
}

}  // namespace kvonce::tool
