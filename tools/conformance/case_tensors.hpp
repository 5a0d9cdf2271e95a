// A conformance case as a value, and the tensors that it describes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "guarded_buffer.hpp"
#include "kvonce/kvonce.hpp"

namespace kvonce::conformance {

/// What stands wherever no valid element is: around tensors, in stride gaps, past kv_len, before kv_start.
enum class Poison { zero, nan, large };

/// A value by (seq, head, token, dim).
using ValueFn = std::function<double(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;

/// How a [num_seqs, num_heads, num_tokens, dim] tensor lies in memory.
struct TensorLayout {
  bool token_major = false;        // [seq, token, head, dim] instead of [seq, head, token, dim]
  bool expand_heads = false;       // K and V: one head in memory, head stride 0
  std::int64_t row_gap = 0;        // unused elements (blocks) after each row
  std::int64_t spare_tokens = 0;   // allocated tokens beyond the shape's, as in a slice of a longer cache
  std::int64_t offset_bytes = -1;  // payload start after a 64-byte boundary; -1: flush with an unmapped page at the end
};

/// Which axes a mask broadcasts over, with a stride of 0: it holds index 0 only.
struct MaskLayout {
  bool one_seq = false;
  bool one_head = false;
  bool one_row = false;
  std::int64_t token_gap = 0;  // unused entries between two tokens'
};

struct CaseSpec {
  std::string name;
  Problem problem;
  PlanOptions options;
  int num_threads = 1;
  std::vector<std::int32_t> kv_lens;    // empty: null
  std::vector<std::int32_t> kv_starts;  // empty: null
  TensorLayout q, k, v, out;
  bool want_lse = true;
  Poison poison = Poison::nan;
  std::uint64_t seed = 1;
  ValueFn q_value, k_value, v_value;       // empty: normal_value(seed, ...)
  ValueFn mask_value;                      // (seq, q_head, row, token); boolean and tree: 0 hides; empty: random
  MaskLayout mask;                         // of a boolean or additive mask
  std::vector<float> sinks, alibi_slopes;  // used with the problem's flags; empty: chosen from the seed
  std::vector<float> mask_slopes;
  std::vector<Segment> segments;  // used with has_segments
  double v_max = 3.4642;          // bound of |V|, for the tolerance
};

/// Owns every tensor of a case; the spec must outlive it.
class CaseTensors {
 public:
  explicit CaseTensors(const CaseSpec& spec);

  [[nodiscard]] const Inputs& inputs() const { return inputs_; }
  [[nodiscard]] const Outputs& outputs() const { return outputs_; }

  /// What inputs() and outputs() point into, for a mirror in another memory.
  [[nodiscard]] std::vector<const GuardedBuffer*> input_buffers() const;
  [[nodiscard]] std::vector<GuardedBuffer*> output_buffers();

  /// Fills out, lse and everything around them with 0xff bytes (NaN in every dtype).
  void reset_outputs();
  /// Empty, or what was written that must not be: gaps and margins of out and lse.
  [[nodiscard]] std::string stray_writes() const;

  [[nodiscard]] double out_value(std::int64_t seq, std::int64_t head, std::int64_t row, std::int64_t dim) const;
  [[nodiscard]] double lse_value(std::int64_t seq, std::int64_t head, std::int64_t row) const;
  /// The bytes of out and lse in logical order, for bitwise comparison.
  [[nodiscard]] std::vector<unsigned char> result_bytes() const;

 private:
  void make_q();
  void make_cache(bool is_k);
  void make_pages();
  void make_mask();
  void make_per_head();
  void make_outputs();
  [[nodiscard]] std::vector<std::vector<std::int64_t>> valid_tokens() const;

  const CaseSpec& spec_;
  GuardedBuffer q_, k_, v_, out_, lse_, mask_;
  GuardedBuffer k_scales_, k_biases_, v_scales_, v_biases_;
  GuardedBuffer sinks_, alibi_slopes_, mask_slopes_, block_table_, kv_lens_, kv_starts_;
  Inputs inputs_;
  Outputs outputs_;
};

}  // namespace kvonce::conformance
