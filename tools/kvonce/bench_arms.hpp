// The arms of one case: what each runs, what it is called, and whether its result is right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "baselines/baselines.hpp"
#include "kvonce/bench_buffer.hpp"
#include "kvonce/case_string.hpp"
#include "kvonce/kvonce.hpp"

namespace kvonce::tool {

/// kvonce, per_head, read, qmv: the order in which they are reported.
const std::vector<std::string>& arm_names();

/// One row of the result as the oracle computes it from set 0.
struct OracleRow {
  std::int64_t seq = 0;
  std::int64_t head = 0;
  std::int64_t query_idx = 0;
  std::vector<double> out;  // [head_dim_v]
};

/// A case laid out in the buffer: num_sets copies of K and V, packed [num_seqs, num_kv_heads, kv_len, head_dim] each.
struct CaseData {
  Problem problem;
  bool tokens_first = false;  // K and V as [num_seqs, kv_len, num_kv_heads, head_dim]
  std::int64_t k_bytes = 0;
  std::int64_t v_bytes = 0;
  std::int64_t set_bytes = 0;  // from one set to the next
  std::int64_t num_sets = 1;
  char* base = nullptr;
  std::vector<std::byte> q;  // [num_seqs, num_q_heads, q_len, head_dim_qk] of q_dtype
  std::vector<OracleRow> oracle_rows;

  [[nodiscard]] std::int64_t kv_bytes() const { return k_bytes + v_bytes; }
  [[nodiscard]] Inputs inputs(std::int64_t set) const;
};

/// Sizes of a case that rotates over at least `rotation_bytes`; base is still null.
CaseData lay_out_case(const Problem& problem, std::int64_t rotation_bytes);
/// Points the case at the buffer, makes its queries and runs the oracle for a few rows: it is far too slow for all.
void place_case(CaseData& data, const BenchBuffer& buffer);

struct Arm {
  std::string name;
  std::string kernel;
  std::int64_t read_factor = 1;
  std::function<void(std::int64_t set)> run;
  std::function<std::optional<double>()> error;  // of the last run, which must have been on set 0
  double max_error = 0.0;                        // above it the result is wrong
};

/// `data` outlives the arm. Throws Error{InvalidArgument, Unsupported} when the arm cannot serve the case.
Arm make_arm(std::string_view name, const CaseData& data, const Device& device, const PlanOptions& options,
             const bench::TargetKernels& kernels, const bench::ReadLoop& read_loop);

}  // namespace kvonce::tool
