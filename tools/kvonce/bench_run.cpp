#include "kvonce/bench_run.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kvonce/bench_arms.hpp"
#include "kvonce/bench_cuda.hpp"
#include "kvonce/bench_rows.hpp"
#include "kvonce/bench_timing.hpp"
#include "kvonce/output.hpp"

namespace kvonce::tool {
namespace {

using bench::Rates;
using bench::Team;

constexpr double kSecondsPerCase = 2.0;
constexpr std::int64_t kMinRounds = 7;
constexpr std::int64_t kMaxRounds = 201;
constexpr int kReadLoopRounds = 3;

// The loop with the best median for this case: which one wins depends on its size.
const bench::ReadLoop& fastest_read_loop(const CaseData& data, const bench::TargetKernels& kernels, Team team,
                                         Rotation& rotation) {
  std::array<std::vector<double>, bench::kNumReadLoops> times;
  for (int round = 0; round <= kReadLoopRounds; ++round) {
    for (std::size_t i = 0; i < times.size(); ++i) {
      const char* const set = data.base + rotation.next() * data.set_bytes;
      const double begin = now_us();
      bench::run_read(kernels.read_loops[i], set, data.kv_bytes(), team);
      if (round > 0) times[i].push_back(now_us() - begin);  // the first round warms up
    }
  }
  std::size_t best = 0;
  for (std::size_t i = 1; i < times.size(); ++i) {
    if (median(times[i]) < median(times[best])) best = i;
  }
  return kernels.read_loops[best];
}

// Microseconds of arithmetic that no kernel of this target can do without.
double arithmetic_us(const Problem& problem, const Rates& rates) {
  const auto pairs = static_cast<double>(problem.num_seqs * problem.num_q_heads * problem.q_len) *
                     static_cast<double>(problem.max_kv_len);
  const double madds = pairs * static_cast<double>(problem.head_dim_qk + problem.dim_v());
  // Pair products are not faster everywhere: Sapphire Rapids issues fewer multiply-adds a second that way.
  const bool has_pairs = problem.k_format == KvFormat::bf16;
  const double rate = has_pairs ? std::max(rates.madd_bf16_per_s, rates.madd_per_s) : rates.madd_per_s;
  return (madds / rate + pairs / rates.exp_per_s) * 1e6;
}

class Bench {
 public:
  explicit Bench(const BenchSettings& settings)
      : settings_(settings),
        team_{settings.device.num_threads},
        kernels_(bench::target_kernels(settings.device.target)) {}

  BenchOutcome run() {
    std::vector<CaseData> cases;
    std::int64_t buffer_bytes = 0;
    for (const CaseSpec& spec : settings_.cases) {
      cases.push_back(lay_out_case(timed_problem(spec, settings_.dtype), rotation_bytes(settings_.device)));
      cases.back().tokens_first = spec.tokens_first;
      buffer_bytes = std::max(buffer_bytes, cases.back().num_sets * cases.back().set_bytes);
      // Refuses what cannot run before anything is timed.
      if (uses("kvonce")) (void)make_plan(cases.back().problem, settings_.device, settings_.plan);
    }
    cpu::Pool::shared().reserve(team_.num_threads);
    rates_ = bench::measure_rates(kernels_, team_);
    describe_device();
    Progress progress("bench: case");
    for (std::size_t i = 0; i < cases.size(); ++i) {
      progress.update(static_cast<std::int64_t>(i) + 1, static_cast<std::int64_t>(cases.size()));
      buffer_.prepare(buffer_bytes, cases[i].problem.k_format, team_);
      run_case(settings_.cases[i], cases[i]);
    }
    return std::move(outcome_);
  }

 private:
  [[nodiscard]] bool uses(std::string_view arm) const {
    return std::find(settings_.arms.begin(), settings_.arms.end(), arm) != settings_.arms.end();
  }

  void describe_device() {
    const Device& device = settings_.device;
    BenchDevice& described = outcome_.report.device;
    outcome_.report.kvonce_version = version();
    described.name = device.name;
    described.target = device.target;
    described.threads = device.num_threads;
    described.l1_bytes = device.l1_bytes;
    described.l2_bytes = device.l2_bytes;
    described.l3_bytes = device.l3_bytes;
    described.clock_ghz = rates_.clock_ghz;
    described.madd_per_s = rates_.madd_per_s;
    described.madd_per_s_thread = rates_.madd_per_s_thread;
    described.madd_instr_per_cycle = rates_.madd_instr_per_cycle;
    if (rates_.madd_bf16_per_s > 0.0) {
      described.madd_bf16_per_s = rates_.madd_bf16_per_s;
      described.madd_bf16_per_s_thread = rates_.madd_bf16_per_s_thread;
      described.madd_bf16_instr_per_cycle = rates_.madd_bf16_instr_per_cycle;
    }
    described.exp_per_s = rates_.exp_per_s;
    described.exp_per_s_thread = rates_.exp_per_s_thread;
    described.buffer_bytes = rotation_bytes(device);
  }

  void run_case(const CaseSpec& spec, CaseData& data) {
    place_case(data, buffer_);
    Rotation rotation(data.num_sets);
    const bench::ReadLoop* read_loop = kernels_.read_loops.data();
    if (uses("read")) read_loop = &fastest_read_loop(data, kernels_, team_, rotation);
    std::vector<Arm> arms;
    for (const std::string& name : settings_.arms) {
      arms.push_back(make_arm(name, data, settings_.device, settings_.plan, kernels_, *read_loop));
    }
    std::vector<std::optional<double>> errors;
    for (const Arm& arm : arms) {
      arm.run(0);
      errors.push_back(arm.error());
      if (errors.back() && !(*errors.back() <= arm.max_error)) {
        outcome_.wrong.push_back(
            fmt::format("case '{}' arm {}: relative RMS error {:.2e} against the oracle, allowed {:.0e}",
                        to_string(spec), arm.name, *errors.back(), arm.max_error));
      }
    }
    const RoundLimits limits = settings_.rounds > 0 ? RoundLimits{settings_.rounds, settings_.rounds, 0.0}
                                                    : RoundLimits{kMinRounds, kMaxRounds, kSecondsPerCase};
    const std::vector<std::vector<double>> us = time_arms(arms, limits, rotation);
    const std::size_t first = outcome_.report.rows.size();
    for (std::size_t i = 0; i < arms.size(); ++i) {
      const ArmLabel label{arms[i].name, arms[i].kernel, arms[i].read_factor};
      BenchRow row = make_row(spec, data, Backend::cpu, label, us[i]);
      row.rel_rms_error = errors[i];
      outcome_.report.rows.push_back(std::move(row));
    }
    finish_rows(outcome_.report, first, arithmetic_us(data.problem, rates_), std::string(read_loop->name));
  }

  const BenchSettings& settings_;
  Team team_;
  const bench::TargetKernels& kernels_;
  BenchBuffer buffer_;
  Rates rates_;
  BenchOutcome outcome_;
};

}  // namespace

BenchOutcome run_bench(const BenchSettings& settings) {
  return settings.device.backend == Backend::cuda ? run_cuda_bench(settings) : Bench(settings).run();
}

}  // namespace kvonce::tool
