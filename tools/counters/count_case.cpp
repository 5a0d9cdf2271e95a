#include "counters/count_case.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "baselines/cuda/kernels.hpp"
#include "baselines/cuda/status.hpp"
#include "kvonce/bench_timing.hpp"
#include "kvonce/output.hpp"

namespace kvonce::tool {
namespace {

using bench::cuda::require_success;

constexpr double kSectorBytes = 32.0;

const std::vector<std::string>& dram_candidates() {
  static const std::vector<std::string> names = {"dram__bytes_read.sum", "dram__sectors_read.sum",
                                                 "fbpa__dram_read_bytes.sum", "fbpa__dram_read_sectors.sum"};
  return names;
}

// What the multiprocessors receive for loads from global memory, counted where it arrives (distributed shared memory is
// not in it), then the sectors that they ask of the L2, then all that arrives.
const std::vector<std::string>& l2_candidates() {
  static const std::vector<std::string> names = {
      "l1tex__m_xbar2l1tex_read_bytes_mem_lg_op_ld.sum", "lts__t_sectors_srcunit_tex_op_read.sum",
      "l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_xbar2l1tex_read_sectors.sum"};
  return names;
}

std::vector<std::string> those_of_chip(const Metrics& metrics, const std::vector<std::string>& names) {
  std::vector<std::string> found;
  std::copy_if(names.begin(), names.end(), std::back_inserter(found),
               [&metrics](const std::string& name) { return metrics.find(name).has_value(); });
  return found;
}

// The first of the names that starts with one of the prefixes and counts bytes or sectors.
std::optional<ByteCounter> byte_counter(const Metrics& metrics, const std::vector<std::string>& names,
                                        const std::vector<std::string>& prefixes) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool fits = std::any_of(prefixes.begin(), prefixes.end(),
                                  [&](const std::string& prefix) { return names[i].starts_with(prefix); });
    const std::optional<MetricInfo> info = metrics.find(names[i]);
    if (!fits || !info) continue;
    if (info->unit == "byte") return ByteCounter{i, 1.0};
    if (info->unit.ends_with("sector")) return ByteCounter{i, kSectorBytes};
  }
  return std::nullopt;
}

// A case in device memory: one set, since the caches are emptied before every call.
struct PlacedSet {
  explicit PlacedSet(CaseData& data)
      : host(std::make_unique_for_overwrite<char[]>(static_cast<std::size_t>(data.set_bytes))),
        memory(static_cast<std::size_t>(data.set_bytes)) {
    fill_random(host.get(), data.set_bytes, data.problem.k_format, 1);
    copy_to_device(memory.data(), host.get(), memory.bytes());
    place_case(data, host.get());
    on_device.host = &data;
    on_device.base = memory.data();
    on_device.q.allocate(data.q.size());
    copy_to_device(on_device.q.data(), data.q.data(), data.q.size());
  }

  std::unique_ptr<char[]> host;
  DeviceMemory memory;
  CudaCase on_device;
};

// Fills the L2 with something else by reading it: nothing is left to be written back.
class Flush {
 public:
  Flush(std::int64_t bytes, int num_sms, const CudaStream& stream)
      : memory_(static_cast<std::size_t>(bytes)), sum_(sizeof(std::uint32_t)), num_sms_(num_sms), stream_(stream) {
    require_success(cudaMemsetAsync(memory_.data(), 0, memory_.bytes(), stream.get()), "clearing the flush buffer");
    require_success(cudaMemsetAsync(sum_.data(), 0, sum_.bytes(), stream.get()), "clearing a sum");
    stream.wait();
  }

  void run() const {
    bench::cuda::run_read(bench::cuda::read_shapes().front(), memory_.data(),
                          static_cast<std::int64_t>(memory_.bytes()), reinterpret_cast<std::uint32_t*>(sum_.data()),
                          false, num_sms_, stream_.get());
    stream_.wait();
  }

 private:
  DeviceMemory memory_;
  DeviceMemory sum_;
  int num_sms_;
  const CudaStream& stream_;
};

class Counting {
 public:
  Counting(const CountSettings& settings, const CuptiDevice& device, const Metrics& metrics)
      : settings_(settings),
        device_(device),
        metrics_(metrics),
        flush_(settings.flush_bytes, settings.bench.device.num_sms, stream_) {}

  CountOutcome run() {
    const BenchSettings& bench = settings_.bench;
    std::vector<CaseData> cases;
    for (const CaseSpec& spec : bench.cases) {
      cases.push_back(lay_out_case(timed_problem(spec, bench.dtype, Backend::cuda), 0));
      cases.back().tokens_first = spec.tokens_first;
      for (const std::string& arm : bench.arms) require_servable(arm, cases.back().problem, bench);
    }
    Progress progress("counters: case");
    for (std::size_t i = 0; i < cases.size(); ++i) {
      progress.update(static_cast<std::int64_t>(i) + 1, static_cast<std::int64_t>(cases.size()));
      const PlacedSet placed(cases[i]);
      for (const std::string& arm : bench.arms) run_arm(bench.cases[i], arm, placed.on_device);
    }
    return std::move(outcome_);
  }

 private:
  // A failure is one row less: the next arm may tell more.
  void run_arm(const CaseSpec& spec, const std::string& name, const CudaCase& on_device) {
    try {
      count_arm(spec, make_cuda_arms(name, on_device, settings_.bench, stream_).front(), on_device);
    } catch (const Error& error) {
      outcome_.wrong.push_back(fmt::format("case '{}' arm {}: {}", to_string(spec), name, error.what()));
    }
  }

  void count_arm(const CaseSpec& spec, const CudaArm& arm, const CudaCase& on_device) {
    const CudaFinding finding = arm.check();  // also loads the kernel, which would read memory in the first count
    if (!finding.wrong.empty()) {
      outcome_.wrong.push_back(
          fmt::format("case '{}' arm {} ({}): {}", to_string(spec), arm.label.name, arm.label.kernel, finding.wrong));
    }
    CountRow row;
    row.case_text = to_string(spec);
    row.label = arm.label;
    row.kv_format = on_device.host->problem.k_format;
    row.kv_bytes = on_device.host->kv_bytes();
    row.rel_rms_error = finding.rel_rms_error;
    row.values.resize(metrics_.selected().size());
    for (std::int64_t round = 0; round < settings_.rounds; ++round) {
      const std::vector<double> values = metrics_.count(
          device_, [this] { flush_.run(); },
          [&] {
            arm.enqueue(0);
            stream_.wait();
          });
      for (std::size_t i = 0; i < values.size(); ++i) row.values[i].push_back(values[i]);
    }
    const auto bytes = [&row](const ByteCounter& counter) { return median(row.values[counter.index]) * counter.bytes; };
    row.dram_bytes_read = bytes(settings_.counters.dram_read);
    row.l2_to_sm_bytes = bytes(settings_.counters.l2_to_sm);
    outcome_.rows.push_back(std::move(row));
  }

  const CountSettings& settings_;
  const CuptiDevice& device_;
  const Metrics& metrics_;
  CudaStream stream_;
  Flush flush_;
  CountOutcome outcome_;
};

}  // namespace

CounterChoice choose_counters(const Metrics& metrics, const std::vector<std::string>& asked_for) {
  CounterChoice choice;
  choice.names = asked_for;
  for (const std::string& name : asked_for) {
    if (name.find('.') == std::string::npos || !metrics.find(name)) {
      throw Error(ErrorCode::InvalidArgument,
                  fmt::format("--metrics: '{}' is no counter of the chip with its rollup, as in dram__bytes_read.sum; "
                              "--list prints the counters",
                              name));
    }
  }
  if (asked_for.empty()) {
    const std::vector<std::string> dram = those_of_chip(metrics, dram_candidates());
    const std::vector<std::string> l2 = those_of_chip(metrics, l2_candidates());
    choice.names.insert(choice.names.end(), dram.begin(), dram.begin() + std::min<std::ptrdiff_t>(1, std::ssize(dram)));
    choice.names.insert(choice.names.end(), l2.begin(), l2.begin() + std::min<std::ptrdiff_t>(2, std::ssize(l2)));
  }
  const std::optional<ByteCounter> dram_read = byte_counter(metrics, choice.names, {"dram__", "fbpa__"});
  const std::optional<ByteCounter> l2_to_sm = byte_counter(metrics, choice.names, {"l1tex__", "lts__"});
  if (!dram_read || !l2_to_sm) {
    throw Error(ErrorCode::Unsupported,
                fmt::format("--metrics: needs a counter of bytes or sectors of dram__ or fbpa__ and one of l1tex__ or "
                            "lts__, got {}; --list prints the chip's",
                            fmt::join(choice.names, ",")));
  }
  choice.dram_read = *dram_read;
  choice.l2_to_sm = *l2_to_sm;
  return choice;
}

CountOutcome count_cases(const CountSettings& settings, const CuptiDevice& device, const Metrics& metrics) {
  return Counting(settings, device, metrics).run();
}

}  // namespace kvonce::tool
