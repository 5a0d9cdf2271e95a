// A case in memory: where its sets of K and V are, its queries, and the rows of the oracle that results are compared with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvonce/bench_buffer.hpp"
#include "kvonce/kvonce.hpp"

namespace kvonce::tool {

/// One row of the result as the oracle computes it from set 0.
struct OracleRow {
  std::int64_t seq = 0;
  std::int64_t head = 0;
  std::int64_t query_idx = 0;
  std::vector<double> out;  // [head_dim_v]
};

/// A case laid out in the buffer: num_sets copies of K and V, packed [num_seqs, num_kv_heads, kv_len, head_dim] each, of MLX's
/// formats then K's scales and biases and V's.
struct CaseData {
  Problem problem;
  bool tokens_first = false;  // K and V as [num_seqs, kv_len, num_kv_heads, head_dim]
  std::int64_t k_bytes = 0;
  std::int64_t v_bytes = 0;
  std::int64_t k_side_bytes = 0;  // of K's scales, and as many of its biases
  std::int64_t v_side_bytes = 0;
  std::int64_t set_bytes = 0;  // from one set to the next
  std::int64_t num_sets = 1;
  char* base = nullptr;
  std::vector<std::byte> q;  // [num_seqs, num_q_heads, q_len, head_dim_qk] of q_dtype
  std::vector<std::byte>
      mask;  // per Problem::mask: shows every key, for all heads: [q_len, kv_len], tree [q_len, q_len]
  std::vector<float> per_head;  // [num_q_heads] sinks and slopes
  std::vector<OracleRow> oracle_rows;

  [[nodiscard]] std::int64_t kv_bytes() const { return k_bytes + v_bytes + 2 * (k_side_bytes + v_side_bytes); }
  [[nodiscard]] Inputs inputs(std::int64_t set) const;
};

/// Sizes of a case that rotates over at least `rotation_bytes`; base is still null.
CaseData lay_out_case(const Problem& problem, std::int64_t rotation_bytes);
/// Points the case at the buffer, makes its queries and runs the oracle for a few rows: it is far too slow for all.
void place_case(CaseData& data, const BenchBuffer& buffer);
/// The same for K and V of set 0 at `base`.
void place_case(CaseData& data, char* base);

/// `count` values stored as f32, f16 or bf16.
std::vector<float> decode_values(KvFormat format, const void* stored, std::size_t count);

/// Relative RMS difference to the oracle over its rows. out [num_seqs, num_q_heads, q_len, head_dim_v], packed.
double sampled_error(const CaseData& data, const std::vector<float>& out);

/// Sum of squared differences over sum of squares.
struct ErrorSum {
  double difference = 0.0;
  double total = 0.0;

  void add(double got, double wanted);
  [[nodiscard]] double relative_rms() const;
};

/// Elements of the result.
std::size_t out_elements(const Problem& problem);

}  // namespace kvonce::tool
