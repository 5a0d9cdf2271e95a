#include "kvonce/bench_cuda.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "baselines/cuda/status.hpp"
#include "kvonce/bench_cuda_arms.hpp"
#include "kvonce/bench_cuda_chain.hpp"
#include "kvonce/bench_timing.hpp"
#include "kvonce/output.hpp"

namespace kvonce::tool {
namespace {

using bench::cuda::require_success;

constexpr std::int64_t kRotationBytes = std::int64_t{3} << 30;
constexpr std::int64_t kFewSets = 64;  // where these take less than kRotationBytes and more than the caches hold
constexpr std::int64_t kCachesRotated = 2;
constexpr std::int64_t kMaxSets = 1024;
constexpr std::int64_t kMinLaunches = 20;  // per graph
constexpr std::int64_t kMinRounds = 7;
constexpr std::int64_t kMaxRounds = 51;
constexpr double kSecondsPerCase = 0.5;
constexpr int kContestRounds = 5;

CaseData lay_out_cuda_case(const CaseSpec& spec, const BenchSettings& settings) {
  CaseData data = lay_out_case(timed_problem(spec, settings.dtype, Backend::cuda), 0);
  data.tokens_first = spec.tokens_first;
  const auto sets_of = [&data](std::int64_t bytes) { return (bytes + data.set_bytes - 1) / data.set_bytes; };
  const std::int64_t enough =
      std::min(kMaxSets, std::max(kFewSets, sets_of(kCachesRotated * settings.device.l2_bytes)));
  data.num_sets = std::min(sets_of(kRotationBytes), enough);
  return data;
}

// Random values in device memory, the same as the CPU's cases have.
class CudaBuffer {
 public:
  void prepare(std::int64_t bytes, KvFormat format) {
    if (static_cast<std::size_t>(bytes) > memory_.bytes()) {
      memory_.allocate(static_cast<std::size_t>(bytes));
      format_.reset();
    }
    if (format_ == format) return;
    constexpr std::size_t kPiece = std::size_t{16} << 20;
    std::vector<std::byte> piece(kPiece);
    for (std::size_t at = 0; at < memory_.bytes(); at += kPiece) {
      fill_random(piece.data(), static_cast<std::int64_t>(kPiece), format, at / kPiece + 1);
      copy_to_device(memory_.data() + at, piece.data(), std::min(kPiece, memory_.bytes() - at));
    }
    format_ = format;
  }
  [[nodiscard]] char* data() const { return memory_.data(); }

 private:
  DeviceMemory memory_;
  std::optional<KvFormat> format_;  // of the values that fill it
};

// A case on the device and, for as long, its first set in host memory.
struct PlacedCase {
  PlacedCase(CaseData& data, const CudaBuffer& buffer)
      : set(std::make_unique_for_overwrite<char[]>(static_cast<std::size_t>(data.kv_bytes()))) {
    copy_to_host(set.get(), buffer.data(), static_cast<std::size_t>(data.kv_bytes()));
    place_case(data, set.get());
    on_device.host = &data;
    on_device.base = buffer.data();
    on_device.q.allocate(data.q.size());
    copy_to_device(on_device.q.data(), data.q.data(), data.q.size());
  }

  std::unique_ptr<char[]> set;
  CudaCase on_device;
};

// One arm and the graph of its calls on every set in turn.
struct TimedArm {
  TimedArm(CudaArm arm_given, std::int64_t num_sets, const CudaStream& stream)
      : arm(std::move(arm_given)), num_launches((kMinLaunches + num_sets - 1) / num_sets * num_sets) {
    graph = std::make_unique<CudaGraph>(stream, [&] {
      for (std::int64_t i = 0; i < num_launches; ++i) arm.enqueue(i % num_sets);
    });
    graph->launch(stream);
    stream.wait();
  }

  void time(CudaTimer& timer, const CudaStream& stream) {
    us.push_back(timer.time_us(*graph, stream) / static_cast<double>(num_launches));
  }

  CudaArm arm;
  std::int64_t num_launches;
  std::unique_ptr<CudaGraph> graph;
  std::vector<double> us;  // per call, of every round
};

int attribute(cudaDeviceAttr attribute, int ordinal) {
  int value = 0;
  require_success(cudaDeviceGetAttribute(&value, attribute, ordinal), "reading a property of the device");
  return value;
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

class CudaBench {
 public:
  explicit CudaBench(const BenchSettings& settings) : settings_(settings) {}

  BenchOutcome run() {
    if (settings_.chain && attribute(cudaDevAttrComputeCapabilityMajor, settings_.device.ordinal) < 9) {
      throw Error(ErrorCode::Unsupported,
                  fmt::format("--chain: needs a device of sm_90 or newer, which has programmatic "
                              "launches; this one is {}; leave it out",
                              settings_.device.target));
    }
    std::vector<CaseData> cases;
    std::int64_t buffer_bytes = 0;
    for (const CaseSpec& spec : settings_.cases) {
      cases.push_back(lay_out_cuda_case(spec, settings_));
      buffer_bytes = std::max(buffer_bytes, cases.back().num_sets * cases.back().set_bytes);
      // Refuses what cannot run before anything is timed.
      for (const std::string& arm : settings_.arms) {
        require_servable(arm, cases.back().problem, settings_);
      }
    }
    describe_device();
    Progress progress("bench: case");
    for (std::size_t i = 0; i < cases.size(); ++i) {
      progress.update(static_cast<std::int64_t>(i) + 1, static_cast<std::int64_t>(cases.size()));
      buffer_.prepare(buffer_bytes, cases[i].problem.k_format);
      const PlacedCase placed(cases[i], buffer_);
      if (settings_.chain) {
        run_chain(settings_.cases[i], placed.on_device);
      } else {
        run_case(settings_.cases[i], placed.on_device);
      }
    }
    return std::move(outcome_);
  }

 private:
  void describe_device() {
    const Device& device = settings_.device;
    outcome_.report.kvonce_version = version();
    BenchDevice& described = outcome_.report.device;
    described.backend = Backend::cuda;
    described.name = device.name;
    described.target = device.target;
    described.num_sms = device.num_sms;
    described.l2_bytes = device.l2_bytes;
    described.clock_ghz = attribute(cudaDevAttrClockRate, device.ordinal) * 1e-6;
    described.memory_gbps = 2e-6 * attribute(cudaDevAttrMemoryClockRate, device.ordinal) *
                            attribute(cudaDevAttrGlobalMemoryBusWidth, device.ordinal) / 8.0;
    int driver = 0;
    int runtime = 0;
    require_success(cudaDriverGetVersion(&driver), "reading the driver's version");
    require_success(cudaRuntimeGetVersion(&runtime), "reading the runtime's version");
    described.driver_cuda = version_text(driver);
    described.runtime_cuda = version_text(runtime);
    described.buffer_bytes = kRotationBytes;
  }

  void run_case(const CaseSpec& spec, const CudaCase& on_device) {
    std::vector<std::unique_ptr<TimedArm>> arms;
    std::vector<std::optional<double>> errors;
    for (const std::string& name : settings_.arms) {
      arms.push_back(fastest_form(name, on_device));
      errors.push_back(check(spec, arms.back()->arm, "before"));
    }
    time_arms(arms);
    const std::size_t first = outcome_.report.rows.size();
    std::string read_kernel;
    for (std::size_t i = 0; i < arms.size(); ++i) {
      // What the many calls in between left in a workspace would show now.
      (void)check(spec, arms[i]->arm, "after");
      const ArmLabel& label = arms[i]->arm.label;
      BenchRow row = make_row(spec, *on_device.host, Backend::cuda, label, arms[i]->us);
      row.rel_rms_error = errors[i];
      row.planned_kv_len = arms[i]->arm.planned_kv_len;
      if (label.name == "read") read_kernel = label.kernel;
      outcome_.report.rows.push_back(std::move(row));
    }
    finish_rows(outcome_.report, first, 0.0, read_kernel);
  }

  // Graphs of the neighbours with and without attention between them, and of attention alone, side by side.
  void run_chain(const CaseSpec& spec, const CudaCase& on_device) {
    struct Measured {
      ArmLabel label;
      NeighbourForm form;
      std::size_t graph;
      std::optional<double> error;
    };
    const std::int64_t num_sets = on_device.host->num_sets;
    const ChainNeighbours neighbours(on_device, stream_);
    const CudaArm isolated = std::move(make_cuda_arms("kvonce", on_device, settings_, stream_).front());
    std::vector<std::unique_ptr<TimedArm>> graphs;
    std::vector<Measured> measured;
    for (const NeighbourForm form : kNeighbourForms) {
      graphs.push_back(timed(neighbours.without(isolated, form), num_sets));
    }
    graphs.push_back(timed(isolated, num_sets));
    const std::vector<double>& isolated_us = graphs.back()->us;
    for (const std::string& name : settings_.arms) {
      const CudaArm attention = std::move(make_cuda_arms(name, on_device, settings_, stream_).front());
      for (const NeighbourForm form : kNeighbourForms) {
        // A kernel that waits for the one before has nothing to gain from neighbours that let it in.
        if (name == "kvonce" && form != NeighbourForm::plain) continue;
        graphs.push_back(timed(neighbours.around(attention, form), num_sets));
        measured.push_back({attention.label, form, graphs.size() - 1, check(spec, graphs.back()->arm, "before")});
      }
    }
    time_arms(graphs);
    for (const Measured& m : measured) {
      const TimedArm& chain = *graphs[m.graph];
      (void)check(spec, chain.arm, "after");
      const ChainTimes times = {chain.us, graphs[static_cast<std::size_t>(m.form)]->us, isolated_us};
      BenchRow row = make_chain_row(spec, *on_device.host, m.label, form_name(m.form), times);
      row.rel_rms_error = m.error;
      outcome_.report.rows.push_back(std::move(row));
    }
  }

  // Runs the arm on set 0; what is wrong goes to the outcome.
  std::optional<double> check(const CaseSpec& spec, const CudaArm& arm, const char* when) {
    const CudaFinding finding = arm.check();
    if (!finding.wrong.empty()) {
      outcome_.wrong.push_back(fmt::format("case '{}' arm {} ({}), {} the timing: {}", to_string(spec), arm.label.name,
                                           arm.label.kernel, when, finding.wrong));
    }
    return finding.rel_rms_error;
  }

  std::unique_ptr<TimedArm> timed(CudaArm arm, std::int64_t num_sets) {
    arm.enqueue(0);  // the first call of a kernel may load it, which is nothing for a capture
    stream_.wait();
    return std::make_unique<TimedArm>(std::move(arm), num_sets, stream_);
  }

  // Which form of a streaming arm wins depends on the size of the case.
  std::unique_ptr<TimedArm> fastest_form(const std::string& name, const CudaCase& on_device) {
    std::vector<std::unique_ptr<TimedArm>> forms;
    for (CudaArm& arm : make_cuda_arms(name, on_device, settings_, stream_)) {
      forms.push_back(timed(std::move(arm), on_device.host->num_sets));
    }
    std::size_t best = 0;
    if (forms.size() > 1) {
      for (int round = 0; round < kContestRounds; ++round) {
        for (const auto& form : forms) form->time(timer_, stream_);
      }
      for (std::size_t i = 1; i < forms.size(); ++i) {
        if (median(forms[i]->us) < median(forms[best]->us)) best = i;
      }
    }
    forms[best]->us.clear();
    return std::move(forms[best]);
  }

  // Round by round, each arm once per round, a different arm first each time.
  void time_arms(const std::vector<std::unique_ptr<TimedArm>>& arms) {
    const bool fixed = settings_.rounds > 0;
    const std::int64_t most = fixed ? settings_.rounds : kMaxRounds;
    const double start = now_us();
    for (std::int64_t round = 0; round < most; ++round) {
      for (std::size_t i = 0; i < arms.size(); ++i) {
        arms[(i + static_cast<std::size_t>(round)) % arms.size()]->time(timer_, stream_);
      }
      if (!fixed && round + 1 >= kMinRounds && now_us() - start > kSecondsPerCase * 1e6) break;
    }
  }

  const BenchSettings& settings_;
  CudaStream stream_;
  CudaTimer timer_;
  CudaBuffer buffer_;
  BenchOutcome outcome_;
};

}  // namespace

BenchOutcome run_cuda_bench(const BenchSettings& settings) {
  require_success(cudaSetDevice(settings.device.ordinal), "choosing the device");
  return CudaBench(settings).run();
}

}  // namespace kvonce::tool
