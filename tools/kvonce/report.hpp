// What a benchmark found, and its five forms: JSON (schema kvonce.bench/1), Markdown, CSV, one line per case, SVG.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kvonce/output.hpp"
#include "kvonce/types.hpp"

namespace kvonce::tool {

/// The machine, and what it was measured to do.
struct BenchDevice {
  Backend backend = Backend::cpu;
  std::string name;
  std::string target;
  int threads = 1;
  std::int64_t l1_bytes = 0;  // data caches; 0 when unknown
  std::int64_t l2_bytes = 0;
  std::int64_t l3_bytes = 0;
  double clock_ghz = 0.0;
  double read_gbps = 0.0;   // the best case's read arm
  std::string read_loop;    // and the loop that reached it
  double madd_per_s = 0.0;  // all threads; *_thread: one
  double madd_per_s_thread = 0.0;
  double madd_instr_per_cycle = 0.0;
  std::optional<double> madd_bf16_per_s;  // absent on targets without a bf16 dot product
  std::optional<double> madd_bf16_per_s_thread;
  std::optional<double> madd_bf16_instr_per_cycle;
  double exp_per_s = 0.0;
  double exp_per_s_thread = 0.0;
  std::int64_t buffer_bytes = 0;  // that the sets of a case rotate over, at least; on CUDA, or as bench_cuda.cpp says

  // CUDA only; there clock_ghz is the highest clock of the multiprocessors, and of the rates only read_gbps is known.
  int num_sms = 0;
  double memory_gbps = 0.0;  // memory clock times bus width
  std::string driver_cuda;   // the newest CUDA version that the driver serves
  std::string runtime_cuda;  // the runtime's
};

/// Attention between two neighbours. Medians per call.
struct ChainFigures {
  std::string neighbours;      // plain, late or early
  double chain_us = 0.0;       // producer, attention, consumer
  double neighbours_us = 0.0;  // producer, consumer
  double isolated_us = 0.0;    // attention alone, call after call, without earlier_kv_ready
};

/// One arm of one case.
struct BenchRow {
  std::string case_text;
  std::int64_t num_q_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t kv_len = 0;
  std::int64_t q_len = 1;
  std::int64_t num_seqs = 1;
  std::string kv_dtype;
  std::string backend = "cpu";
  std::string q_dtype;
  std::string arm;
  std::string kernel;
  std::int64_t read_factor = 1;
  double us_median = 0.0;
  double us_min = 0.0;
  std::int64_t kv_bytes = 0;  // K and V, each byte once
  double gbps = 0.0;
  std::optional<double> ratio_to_read;  // these three are absent without the read arm
  std::optional<double> roof_us;
  std::optional<double> ratio_to_roof;
  std::optional<double> rel_rms_error;         // absent for read and floor
  std::optional<std::int64_t> planned_kv_len;  // of the arms with the lengths in device memory
  std::optional<ChainFigures> chain;  // then us_* are chain - neighbours of every round: mode "chain", else "isolated"
};

struct BenchReport {
  std::string kvonce_version;
  BenchDevice device;
  std::vector<BenchRow> rows;  // the arms of a case follow each other
};

nlohmann::ordered_json to_json(const BenchReport& report);

/// The table of all rows. A chain in Markdown: a line per case, a column per arm and form of the neighbours.
std::string render(const BenchReport& report, Format format);

/// One line per case: GB/s of every arm, on CUDA its microseconds, and the speed-up of kvonce over per_head. A chain: the
/// table of render().
std::string render_compact(const BenchReport& report);

/// A bar chart per geometry: GB/s of each arm over the cache lengths, the read arm as a line. Self-contained.
std::string render_svg(const BenchReport& report);

}  // namespace kvonce::tool
