// The arms that kvonce is compared with, and the machine's own rates.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "baselines/target_kernels.hpp"
#include "baselines/team.hpp"
#include "kvonce/attend.hpp"
#include "kvonce/problem.hpp"

namespace kvonce::bench {

/// Attention with one worker per query row: K and V are streamed once for every query head and query token.
/// Serves strided f32, f16 and bf16 caches (K and V alike), causal or not; output float32.
class PerHead {
 public:
  /// Throws Error{Unsupported} for a problem outside of that. `problem` is resolved or not. `prefetch_level` is Policy's.
  PerHead(const TargetKernels& kernels, const Problem& problem, Team team, std::int64_t prefetch_level = 1);

  /// out [num_seqs, num_q_heads, q_len, head_dim_v] packed. Uses inputs.q, k and v only; every sequence is max_kv_len
  /// tokens long. Allocates nothing.
  void run(const Inputs& inputs, float* out);

  [[nodiscard]] std::string kernel_id() const;
  [[nodiscard]] std::int64_t read_factor() const { return problem_.rows_per_stream(); }
  [[nodiscard]] std::int64_t num_blocks() const { return num_blocks_; }

 private:
  void run_block(const Inputs& inputs, std::int64_t row, std::int64_t block, float* o, float* lse) const;

  const TargetKernels& kernels_;
  Problem problem_;
  Team team_;
  std::int64_t prefetch_level_;
  float scale_log2_ = 1.0F;
  std::int64_t num_rows_ = 0;
  std::int64_t step_tokens_ = 0;
  std::int64_t num_blocks_ = 1;
  std::vector<float> partial_o_;    // [num_rows, num_blocks, head_dim_v]
  std::vector<float> partial_lse_;  // [num_rows, num_blocks]
};

/// Streams [data, data + bytes) with all threads and one of the target's read loops; returns the xor of its 8-byte words.
/// data is 64-byte aligned; bytes past the last multiple of 64 are left out.
std::uint64_t run_read(const ReadLoop& loop, const void* data, std::int64_t bytes, Team team);

/// A dense f16 matrix-vector product over exactly the given bytes: rows of kCols columns and a shorter last one.
class Qmv {
 public:
  static constexpr std::int64_t kCols = 2048;

  Qmv(const TargetKernels& kernels, std::int64_t matrix_bytes, Team team);

  /// y has num_rows() elements. Allocates nothing.
  void run(const std::uint16_t* matrix);

  [[nodiscard]] std::string kernel_id() const;
  [[nodiscard]] std::int64_t num_rows() const { return num_full_rows_ + (last_cols_ > 0 ? 1 : 0); }
  [[nodiscard]] const std::vector<float>& x() const { return x_; }
  [[nodiscard]] const std::vector<float>& y() const { return y_; }
  /// Columns of row `row`.
  [[nodiscard]] std::int64_t cols(std::int64_t row) const { return row < num_full_rows_ ? kCols : last_cols_; }

 private:
  const TargetKernels& kernels_;
  Team team_;
  std::int64_t num_full_rows_ = 0;
  std::int64_t last_cols_ = 0;
  std::vector<float> x_;
  std::vector<float> y_;
};

/// What the cores can do without memory. Rates count single multiply-adds and exponentials.
struct Rates {
  double clock_ghz = 0.0;             // a dependent chain of integer additions, measured between the multiply-add loops
  double madd_per_s_thread = 0.0;     // one thread, float32
  double madd_per_s = 0.0;            // all threads of the team at once
  double madd_instr_per_cycle = 0.0;  // vector multiply-adds per clock cycle of one thread
  double madd_bf16_per_s_thread = 0.0;  // the bf16 dot product; 0 on targets without one
  double madd_bf16_per_s = 0.0;
  double madd_bf16_instr_per_cycle = 0.0;
  double exp_per_s_thread = 0.0;
  double exp_per_s = 0.0;
};

/// Takes about a fifth of a second.
Rates measure_rates(const TargetKernels& kernels, Team team);

}  // namespace kvonce::bench
