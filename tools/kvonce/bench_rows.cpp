#include "kvonce/bench_rows.hpp"

#include <algorithm>
#include <optional>

#include "kvonce/bench_timing.hpp"

namespace kvonce::tool {

BenchRow make_row(const CaseSpec& spec, const CaseData& data, Backend backend, const ArmLabel& arm,
                  const std::vector<double>& us) {
  const Problem& problem = data.problem;
  CaseSpec plain = spec;
  plain.dtype.reset();  // its own columns
  BenchRow row;
  row.case_text = to_string(plain);
  row.num_q_heads = problem.num_q_heads;
  row.num_kv_heads = problem.num_kv_heads;
  row.head_dim_qk = problem.head_dim_qk;
  row.head_dim_v = problem.dim_v();
  row.kv_len = problem.max_kv_len;
  row.q_len = problem.q_len;
  row.num_seqs = problem.num_seqs;
  row.kv_dtype = to_string(problem.k_format);
  row.q_dtype = to_string(problem.q_dtype);
  row.backend = to_string(backend);
  row.arm = arm.name;
  row.kernel = arm.kernel;
  row.read_factor = arm.read_factor;
  row.us_median = median(us);
  row.us_min = *std::min_element(us.begin(), us.end());
  row.kv_bytes = data.kv_bytes();
  row.gbps = static_cast<double>(row.kv_bytes) / row.us_median * 1e-3;
  return row;
}

BenchRow make_chain_row(const CaseSpec& spec, const CaseData& data, const ArmLabel& arm, std::string_view neighbours,
                        const ChainTimes& times) {
  std::vector<double> added;
  for (std::size_t i = 0; i < times.chain.size(); ++i) added.push_back(times.chain[i] - times.neighbours[i]);
  BenchRow row = make_row(spec, data, Backend::cuda, arm, added);
  row.chain =
      ChainFigures{std::string(neighbours), median(times.chain), median(times.neighbours), median(times.isolated)};
  return row;
}

void finish_rows(BenchReport& report, std::size_t first, double arithmetic_us, const std::string& read_loop) {
  std::optional<double> read_us;
  for (std::size_t i = first; i < report.rows.size(); ++i) {
    const BenchRow& row = report.rows[i];
    if (row.arm != "read") continue;
    read_us = row.us_median;
    if (row.gbps > report.device.read_gbps) {
      report.device.read_gbps = row.gbps;
      report.device.read_loop = read_loop;
    }
  }
  if (!read_us) return;
  for (std::size_t i = first; i < report.rows.size(); ++i) {
    BenchRow& row = report.rows[i];
    row.ratio_to_read = *read_us / row.us_median;
    row.roof_us = std::max(*read_us, arithmetic_us);
    row.ratio_to_roof = *row.roof_us / row.us_median;
  }
}

}  // namespace kvonce::tool
