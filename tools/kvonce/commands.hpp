// The subcommands and what they are told; main.cpp fills the options from the command line. Those that can find something
// wrong return the exit code (0 ok, 1 a check failed); all throw Error for what main() reports.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvonce/device_options.hpp"
#include "kvonce/output.hpp"

namespace kvonce::tool {

struct BenchOptions {
  DeviceOptions device;
  std::string dtype;  // empty: f16 on the CPU, bf16 on CUDA
  std::string cases_path;
  std::vector<std::string> case_texts;
  std::vector<std::string> arms;
  std::int64_t rounds = 0;
  bool chain = false;               // CUDA
  std::int64_t planned_kv_len = 0;  // CUDA; 0: not asked for
  std::optional<Format> format;
  std::string out_path;
  std::string svg_path;
};

struct TuneOptions {
  DeviceOptions device;             // without a policy: it is what is sought
  std::vector<std::string> dtypes;  // empty is not allowed
  std::string cases_path;
  std::vector<std::string> case_texts;
  std::optional<double> seconds;
  bool quick = false;
  std::optional<Format> format;
  std::string out_path;
  std::string command;  // as it was typed, for the file
};

struct CheckOptions {
  bool quick = false;
  bool full = false;
  std::string backend;  // cpu or cuda; empty: all
  std::string target;   // of the CPU
  std::string policy;   // a policy file; empty: that of KVONCE_POLICY
  std::optional<Format> format;
};

struct RunOptions {
  std::string input;
  std::string out;
  bool causal = true;
  std::optional<double> scale;
  double softcap = 0.0;
  bool lse = false;
  bool check = false;
  DeviceOptions device;
  std::optional<Format> format;
};

struct ExplainOptions {
  std::string case_text;
  std::string dtype = "f16";
  std::string q_dtype;
  DeviceOptions device;
};

int run_bench(const BenchOptions& options);
int run_tune(const TuneOptions& options);
int run_check(const CheckOptions& options);
int run_file(const RunOptions& options);
void run_explain(const ExplainOptions& options);
void run_devices(Format format);

}  // namespace kvonce::tool
