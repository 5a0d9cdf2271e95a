#include "kvonce/run_check.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/reference.hpp"
#include "kvonce/output.hpp"
#include "shared/numeric.h"

namespace kvonce::tool {
namespace {

constexpr double kLseTolerance = 1e-5;

std::int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

double element(const void* data, DType dtype, std::int64_t idx) {
  const std::byte* at = static_cast<const std::byte*>(data) + idx * element_bytes(dtype);
  if (dtype == DType::f32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return static_cast<double>(value);
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return static_cast<double>(dtype == DType::f16 ? shared::f16_to_f32(bits) : shared::bf16_to_f32(bits));
}

// |a - b|, where equal infinities and two NaNs agree.
double difference(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0.0;
  const double gap = std::abs(a - b);
  return std::isnan(gap) ? INFINITY : gap;
}

TensorView stream_of(const TensorView& view, std::int64_t bytes, std::int64_t seq, std::int64_t head) {
  TensorView stream = view;
  const std::int64_t offset = (seq * view.seq_stride + head * view.head_stride) * bytes;
  if (view.data != nullptr) stream.data = static_cast<const std::byte*>(view.data) + offset;
  return stream;
}

struct Errors {
  double squared_error = 0.0;
  double squared_oracle = 0.0;
  double max_error = 0.0;
  double max_lse_error = 0.0;
  bool lse_passed = true;
};

// The rows of one KV stream: one sequence, one KV head, the group of query heads that share it.
Errors check_stream(const Problem& problem, const Inputs& inputs, const void* out, const float* lse, std::int64_t seq,
                    std::int64_t kv_head) {
  const std::int64_t group_size = problem.group_size();
  Problem part = problem;
  part.num_seqs = 1;
  part.num_q_heads = group_size;
  part.num_kv_heads = 1;
  Inputs part_inputs = inputs;
  part_inputs.q = stream_of(inputs.q, element_bytes(problem.q_dtype), seq, kv_head * group_size);
  part_inputs.k = stream_of(inputs.k, format_bytes(problem.k_format, 1), seq, kv_head);
  part_inputs.v = stream_of(inputs.v, format_bytes(problem.v_format, 1), seq, kv_head);
  if (inputs.kv_lens != nullptr) part_inputs.kv_lens = inputs.kv_lens + seq;
  if (inputs.sinks != nullptr) part_inputs.sinks = inputs.sinks + kv_head * group_size;
  if (inputs.alibi_slopes != nullptr) part_inputs.alibi_slopes = inputs.alibi_slopes + kv_head * group_size;
  if (inputs.mask != nullptr) {
    const std::int64_t entry_bytes = problem.mask == MaskKind::additive ? element_bytes(problem.mask_dtype) : 1;
    part_inputs.mask = static_cast<const std::byte*>(inputs.mask) +
                       (seq * inputs.mask_seq_stride + kv_head * group_size * inputs.mask_head_stride) * entry_bytes;
  }
  const core::ReferenceResult oracle = core::reference_attend(part, part_inputs);

  Errors errors;
  const std::int64_t first_row = (seq * problem.num_q_heads + kv_head * group_size) * problem.q_len;
  const std::int64_t first_value = first_row * problem.dim_v();
  for (std::size_t i = 0; i < oracle.out.size(); ++i) {
    const double want = oracle.out[i];
    const double gap = difference(element(out, problem.out_dtype, first_value + static_cast<std::int64_t>(i)), want);
    errors.squared_error += gap * gap;
    if (std::isfinite(want)) errors.squared_oracle += want * want;
    errors.max_error = std::max(errors.max_error, gap);
  }
  for (std::size_t i = 0; i < oracle.lse.size(); ++i) {
    const double want = oracle.lse[i];
    const double gap = difference(static_cast<double>(lse[first_row + static_cast<std::int64_t>(i)]), want);
    errors.max_lse_error = std::max(errors.max_lse_error, gap);
    if (gap > kLseTolerance * std::max(1.0, std::isfinite(want) ? std::abs(want) : 1.0)) errors.lse_passed = false;
  }
  return errors;
}

std::vector<Errors> check_streams(const Problem& problem, const Inputs& inputs, const void* out, const float* lse) {
  const std::int64_t num_streams = problem.num_seqs * problem.num_kv_heads;
  std::vector<Errors> results(static_cast<std::size_t>(num_streams));
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> num_done{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  Progress progress("checking KV streams");

  const auto work = [&](bool reports_progress) {
    try {
      for (std::int64_t i = next++; i < num_streams; i = next++) {
        results[static_cast<std::size_t>(i)] =
            check_stream(problem, inputs, out, lse, i / problem.num_kv_heads, i % problem.num_kv_heads);
        const std::int64_t done = ++num_done;
        if (reports_progress) progress.update(done, num_streams);
      }
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      failure = std::current_exception();
      next = num_streams;
    }
  };
  {
    const std::int64_t num_cpus = std::max(1U, std::thread::hardware_concurrency());
    std::vector<std::jthread> helpers;
    for (std::int64_t i = 1; i < std::min(num_cpus, num_streams); ++i) helpers.emplace_back(work, false);
    work(true);
  }
  if (failure) std::rethrow_exception(failure);
  return results;
}

}  // namespace

double allowed_rel_rms_error(const Problem& problem) {
  if (problem.out_dtype == DType::f16) return 0x1p-11;
  if (problem.out_dtype == DType::bf16) return 0x1p-8;
  constexpr double kAllF32 = 2e-6;
  constexpr double kRoundedCache = 1e-5;
  const bool is_all_f32 = problem.k_format == KvFormat::f32 && problem.v_format == KvFormat::f32;
  return is_all_f32 ? kAllF32 : kRoundedCache;
}

CheckResult check_against_oracle(const Problem& problem, const Inputs& inputs, const void* out, const float* lse) {
  Errors total;
  for (const Errors& errors : check_streams(problem, inputs, out, lse)) {
    total.squared_error += errors.squared_error;
    total.squared_oracle += errors.squared_oracle;
    total.max_error = std::max(total.max_error, errors.max_error);
    total.max_lse_error = std::max(total.max_lse_error, errors.max_lse_error);
    total.lse_passed = total.lse_passed && errors.lse_passed;
  }
  CheckResult result;
  result.rel_rms_error = std::sqrt(total.squared_error / (total.squared_oracle > 0 ? total.squared_oracle : 1.0));
  result.max_error = total.max_error;
  result.max_lse_error = total.max_lse_error;
  result.tolerance = allowed_rel_rms_error(problem);
  result.lse_tolerance = kLseTolerance;
  result.passed = result.rel_rms_error <= result.tolerance && total.lse_passed;
  return result;
}

}  // namespace kvonce::tool
