// kvonce_cuda_counters: what a call reads from DRAM and what of it crosses from the L2 to the multiprocessors, beside the
// bytes of K and V. A tool for one figure, built on request where CUPTI is.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "baselines/cuda/status.hpp"
#include "counters/count_case.hpp"
#include "counters/cupti_profiler.hpp"
#include "kvonce/bench_cases.hpp"
#include "kvonce/device_options.hpp"
#include "kvonce/output.hpp"

namespace kvonce::tool {
namespace {

using bench::cuda::require_success;
using nlohmann::ordered_json;

constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kBadUsage = 2;
constexpr int kUnavailable = 3;

struct Options {
  std::string cases_path;
  std::vector<std::string> case_texts;
  std::string dtype = "bf16";
  std::vector<std::string> arms = {"kvonce", "per_head", "read"};
  std::vector<std::string> metrics;
  std::int64_t rounds = 5;
  std::string out_path;
  std::string policy;
  bool list = false;
  std::string list_text;
  std::string chip;
  bool trace = false;
};

// The seed's rows that are long enough to count something.
std::vector<std::string> default_cases() {
  std::vector<std::string> texts;
  for (const char* const geometry : {"32q/32kv d128", "32q/8kv d128", "32q/4kv d128", "16q/2kv d128", "64q/8kv d64"}) {
    for (const int kv_len : {8192, 32768}) texts.push_back(fmt::format("{} kv={}", geometry, kv_len));
  }
  return texts;
}

// Settles what is counted and says so.
CounterChoice select_counters(Metrics& metrics, const std::vector<std::string>& asked_for) {
  CounterChoice choice = choose_counters(metrics, asked_for);
  metrics.select(choice.names);
  fmt::print(stderr, "kvonce_cuda_counters: CUPTI {}, chip {}: counts {} in passes: {}; from DRAM: {}, L2 to SM: {}\n",
             cupti_version(), metrics.chip(), fmt::join(choice.names, ","), metrics.num_passes(),
             choice.names[choice.dram_read.index], choice.names[choice.l2_to_sm.index]);
  return choice;
}

void print_counters(const Metrics& metrics, const std::string& text) {
  Table table;
  table.columns = {"counter", "unit", "part", "description"};
  for (const MetricInfo& info : metrics.counters()) {
    if (info.name.find(text) == std::string::npos) continue;
    table.rows.push_back({info.name, info.unit, info.counted, info.description});
  }
  print(render(table, Format::csv));
}

// "13.0", and the whole line of the kernel's driver where the system shows it.
std::string driver_text() {
  int version = 0;
  require_success(cudaDriverGetVersion(&version), "reading the driver's version");
  std::string text = fmt::format("CUDA {}.{}", version / 1000, version % 1000 / 10);
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  if (std::getline(file, line)) text += "; " + line;
  return text;
}

ordered_json row_json(const CountRow& row, const std::vector<std::string>& names) {
  const auto kv_bytes = static_cast<double>(row.kv_bytes);
  ordered_json json = {
      {"case", row.case_text},
      {"arm", row.label.name},
      {"kernel", row.label.kernel},
      {"kv_dtype", std::string(to_string(row.kv_format))},
      {"read_factor", row.label.read_factor},
      {"kv_bytes", row.kv_bytes},
      {"dram_bytes_read", row.dram_bytes_read},
      {"l2_to_sm_bytes", row.l2_to_sm_bytes},
      {"dram_read_factor", row.dram_bytes_read / kv_bytes},
      {"l2_read_factor", row.l2_to_sm_bytes / kv_bytes},
      {"rel_rms_error", row.rel_rms_error ? ordered_json(*row.rel_rms_error) : ordered_json(nullptr)},
  };
  for (std::size_t i = 0; i < names.size(); ++i) json["counters"][names[i]] = row.values[i];
  return json;
}

ordered_json report_json(const CountSettings& settings, const CuptiDevice& profiled, const Metrics& metrics,
                         const CountOutcome& outcome, const std::string& command) {
  const Device& device = settings.bench.device;
  const CounterChoice& counters = settings.counters;
  ordered_json json = {
      {"schema", "kvonce.counters/1"},
      {"kvonce_version", std::string(version())},
      {"command", command},
      {"device",
       {{"name", device.name},
        {"chip", profiled.chip()},
        {"cuda_target", device.target},
        {"num_sms", device.num_sms},
        {"l2_bytes", device.l2_bytes}}},
      {"driver", driver_text()},
      {"cupti_version", cupti_version()},
      {"dram_metric", counters.names[counters.dram_read.index]},
      {"l2_to_sm_metric", counters.names[counters.l2_to_sm.index]},
      {"passes", metrics.num_passes()},
      {"rounds", settings.rounds},
      {"flush_bytes", settings.flush_bytes},
  };
  json["rows"] = ordered_json::array();
  for (const CountRow& row : outcome.rows) json["rows"].push_back(row_json(row, counters.names));
  return json;
}

std::string table_text(const CountOutcome& outcome) {
  constexpr double kMib = 0x1p-20;
  Table table;
  table.columns = {"case",           "arm",          "kernel",     "K and V MiB", "DRAM MiB", "L2 to SM MiB",
                   "DRAM / K and V", "L2 / K and V", "read_factor"};
  for (const CountRow& row : outcome.rows) {
    const auto kv_bytes = static_cast<double>(row.kv_bytes);
    table.rows.push_back({row.case_text, row.label.name, row.label.kernel, fmt::format("{:.1f}", kv_bytes * kMib),
                          fmt::format("{:.1f}", row.dram_bytes_read * kMib),
                          fmt::format("{:.1f}", row.l2_to_sm_bytes * kMib),
                          fmt::format("{:.3f}", row.dram_bytes_read / kv_bytes),
                          fmt::format("{:.3f}", row.l2_to_sm_bytes / kv_bytes), row.label.read_factor});
  }
  return render(table, Format::md);
}

CountSettings settings_of(const Options& options) {
  CountSettings settings;
  BenchSettings& bench = settings.bench;
  const bool own = !options.cases_path.empty() || !options.case_texts.empty();
  bench.cases = choose_cases(options.cases_path, own ? options.case_texts : default_cases(), Backend::cuda);
  const std::optional<KvFormat> dtype = parse_format(options.dtype);
  if (!dtype) {
    throw Error(ErrorCode::InvalidArgument,
                fmt::format("--dtype: must be one of {}, got '{}'", format_names(), options.dtype));
  }
  bench.dtype = *dtype;
  bench.arms = options.arms;
  DeviceOptions device;
  device.backend = Backend::cuda;
  device.policy = options.policy;
  bench.device = choose_device(device);
  bench.plan = plan_options(device);
  settings.rounds = options.rounds;
  constexpr std::int64_t kLeastFlush = std::int64_t{512} << 20;
  constexpr std::int64_t kCachesFlushed = 8;
  settings.flush_bytes = std::max<std::int64_t>(kLeastFlush, kCachesFlushed * bench.device.l2_bytes);
  return settings;
}

int count(const Options& options, const std::string& command) {
  if (!options.out_path.empty()) require_writable("--out", options.out_path);
  CountSettings settings = settings_of(options);
  require_success(cudaSetDevice(settings.bench.device.ordinal), "choosing the device");
  require_success(cudaFree(nullptr), "making the context");
  const CuptiDevice device(settings.bench.device.ordinal);
  Metrics metrics(device.chip(), device.availability());
  settings.counters = select_counters(metrics, options.metrics);
  if (options.list) {
    print_counters(metrics, options.list_text);
    return kOk;
  }
  const CountOutcome outcome = count_cases(settings, device, metrics);
  print(table_text(outcome));
  if (!options.out_path.empty()) {
    write_output("--out", options.out_path, report_json(settings, device, metrics, outcome, command).dump(2) + "\n");
  }
  for (const std::string& sentence : outcome.wrong) fmt::print(stderr, "kvonce_cuda_counters: {}\n", sentence);
  return outcome.wrong.empty() ? kOk : kFailed;
}

int run_options(const Options& options, const std::string& command) {
  if (options.trace) trace_cupti_calls();
  if (!options.list || options.chip.empty()) return count(options, command);
  Metrics metrics(options.chip);
  (void)select_counters(metrics, options.metrics);
  print_counters(metrics, options.list_text);
  return kOk;
}

void add_options(CLI::App& app, Options& options) {
  app.add_option("--case", options.case_texts, "A case string; may be given several times")->expected(1)->take_all();
  app.add_option("--cases", options.cases_path, "FILE with one case string per line");
  app.add_option("--dtype", options.dtype, "How K and V are stored when a case has no dtype= (default bf16)");
  app.add_option("--arms", options.arms, "Some of kvonce,per_head,read,qmv,floor (default kvonce,per_head,read)")
      ->delimiter(',')
      ->check(CLI::IsMember({"kvonce", "per_head", "read", "qmv", "floor"}).description(""));
  app.add_option("--metrics", options.metrics,
                 "Counters with rollup instead of the built-in ones: the first of dram__ or fbpa__ is the DRAM's, the "
                 "first of l1tex__ or lts__ the L2's")
      ->delimiter(',');
  constexpr std::int64_t kMostRounds = 1000;
  app.add_option("--rounds", options.rounds, "Counted calls per arm; the median is reported (default 5)")
      ->check(CLI::Range(std::int64_t{1}, kMostRounds).description(""));
  app.add_option("--policy", options.policy, "Tunables: key=value,.. or a policy FILE");
  app.add_option("--out", options.out_path, "FILE for the results as JSON, schema kvonce.counters/1");
  CLI::Option* list =
      app.add_option("--list", options.list_text, "Print the chip's counters whose names hold TEXT")->expected(0, 1);
  app.add_option("--chip", options.chip, "With --list: this chip, such as GH100, which need not be here")->needs(list);
  app.add_flag("--trace", options.trace, "Name every call of CUPTI and its status on standard error");
  app.footer(
      "Examples:\n  kvonce_cuda_counters --out counters.json\n"
      "  kvonce_cuda_counters --case \"32q/4kv d128 kv=32768\" --arms kvonce --trace\n"
      "  kvonce_cuda_counters --list dram__ --chip GH100\n\n"
      "Exit codes: 0 ok, 1 an arm failed or its result is wrong, 2 bad usage, 3 unavailable or unsupported here.");
}

/// As it was called, but for the folder of --out, which means nothing elsewhere.
std::string command_line(int argc, const char* const* argv) {
  std::string text = "kvonce_cuda_counters";
  for (int i = 1; i < argc; ++i) {
    const bool is_out = std::string_view(argv[i - 1]) == "--out";
    const std::string word = is_out ? std::filesystem::path(argv[i]).filename().string() : std::string(argv[i]);
    text += word.find(' ') == std::string::npos ? " " + word : " \"" + word + "\"";
  }
  return text;
}

int report(const std::string& message, int exit_code) {
  fmt::print(stderr, "kvonce_cuda_counters: {}\n", message);
  return exit_code;
}

int run(int argc, char** argv) {
  CLI::App app("Bytes that decode attention reads from DRAM and from the L2, by hardware counters",
               "kvonce_cuda_counters");
  Options options;
  add_options(app, options);
  try {
    app.parse(argc, argv);
    options.list = app.count("--list") > 0;
    return run_options(options, command_line(argc, argv));
  } catch (const CLI::Success& done) {  // --help
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    return report(error.what(), kBadUsage);
  } catch (const Error& error) {
    const bool usage = error.code() == ErrorCode::InvalidArgument;
    return report(error.what(), usage ? kBadUsage : error.code() == ErrorCode::Internal ? kFailed : kUnavailable);
  } catch (const std::exception& error) {
    return report(error.what(), kFailed);
  }
}

}  // namespace
}  // namespace kvonce::tool

int main(int argc, char** argv) {
  try {
    return kvonce::tool::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvonce_cuda_counters: %s\n", error.what());
    return 1;
  }
}
