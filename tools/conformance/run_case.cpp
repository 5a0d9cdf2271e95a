#include "run_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <sstream>

#include "device_mirror.hpp"
#include "generator.hpp"
#include "shared/numeric.h"
#include "shared/token_range.h"

namespace kvonce::conformance {
namespace {

// Half the distance between neighbouring values, relative.
double roundoff(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0x1p-24;
    case DType::f16:
      return 0x1p-11;
    case DType::bf16:
      return 0x1p-8;
  }
  return 0.0;
}

double round_to(DType dtype, double value) {
  const auto x = static_cast<float>(value);
  switch (dtype) {
    case DType::f32:
      return x;
    case DType::f16:
      return shared::f16_to_f32(shared::f32_to_f16(x));
    case DType::bf16:
      return shared::bf16_to_f32(shared::f32_to_bf16(x));
  }
  return x;
}

std::string element(const char* what, std::int64_t seq, std::int64_t head, std::int64_t row, std::int64_t dim) {
  std::ostringstream text;
  text << what << "[seq " << seq << ", head " << head << ", row " << row;
  if (dim >= 0) text << ", dim " << dim;
  text << "]";
  return text.str();
}

std::string mismatch(const std::string& where, double got, double want, double tolerance) {
  std::ostringstream text;
  text.precision(9);
  text << where << " = " << got << ", expected " << want;
  if (tolerance > 0.0) text << " +- " << tolerance;
  return text.str();
}

bool is_listed(std::int64_t dim_qk, std::int64_t dim_v) {
#define KVONCE_HEAD_DIMS(qk, v) \
  if (dim_qk == (qk) && dim_v == (v)) return true;
#include "shared/instances.def"
  return false;
}

// The dims that CUDA's tensor-core kernel is compiled for.
bool is_cuda_listed(std::int64_t dim_qk, std::int64_t dim_v) {
#define KVONCE_CUDA_DIMS(qk, v) \
  if (dim_qk == (qk) && dim_v == (v)) return true;
#include "cuda/instances.def"
  return false;
}

bool is_16_bit_throughout(const Problem& p) {
  return p.q_dtype != DType::f32 && static_cast<int>(p.q_dtype) == static_cast<int>(p.k_format) &&
         p.k_format == p.v_format;
}

// How far rounding the probabilities can take a row of `keys` keys, relative to the largest |V|: each changes by a factor
// of 1 +- u_p, or by half of f16's smallest step, 2^-25, where it is below f16's normal range.
double weight_error(double u_p, DType q_dtype, double keys) {
  return u_p > 0.0 && q_dtype == DType::f16 ? u_p + keys * 0x1p-25 : u_p;
}

CaseResult run_and_judge(const CaseSpec& spec, const Device& device,
                         const std::function<std::string(const Plan&, CaseTensors&, CaseResult&)>& judge) {
  CaseResult result;
  result.name = spec.name;
  if (device.backend == Backend::cuda && !device_failure().empty()) {
    result.status = CaseResult::skipped;
    result.detail = "the device is unusable since " + device_failure();
    return result;
  }
  result.status = CaseResult::failed;
  try {
    const Plan plan = plan_case(spec, device);
    result.kernel_id = std::string(plan.kernel_id());
    std::string expected_id;
    if (!kernel_id_fits(plan, &expected_id)) {
      result.detail = "kernel " + result.kernel_id + " ran, expected " + expected_id;
      return result;
    }
    CaseTensors tensors(spec);
    result.detail = run_case(plan, spec, tensors);
    if (result.detail.empty()) result.detail = judge(plan, tensors, result);
    if (result.detail.empty()) result.status = CaseResult::passed;
  } catch (const Error& error) {
    result.detail = (error.code() == ErrorCode::Internal ? "" : "refused: ") + std::string(error.what());
    const bool unclaimed = device.backend == Backend::cuda && error.code() == ErrorCode::Unsupported;
    if (unclaimed && !cuda_serves(spec.problem)) result.status = CaseResult::skipped;
  }
  return result;
}

}  // namespace

bool is_wanted(const std::string& name) {
  const char* only = std::getenv("KVONCE_ONLY");
  return only == nullptr || name.find(only) != std::string::npos;
}

Plan plan_case(const CaseSpec& spec, const Device& device) {
  Device with_threads = device;
  with_threads.num_threads = spec.num_threads;
  PlanOptions options = spec.options;
  constexpr std::int64_t kTile = 16;
  if (device.backend == Backend::cuda) options.chunk_tokens = shared::ceil_div(options.chunk_tokens, kTile) * kTile;
  return make_plan(spec.problem, with_threads, options);
}

bool kernel_id_fits(const Plan& plan, std::string* expected) {
  const Problem& p = plan.problem();
  const std::string target = "attend_" + plan.device().target + "_";
  const bool listed = plan.device().backend == Backend::cuda
                          ? is_16_bit_throughout(p) && is_cuda_listed(p.head_dim_qk, p.dim_v())
                          : is_listed(p.head_dim_qk, p.dim_v());
  const std::string dims =
      listed ? "_d" + std::to_string(p.head_dim_qk) + "x" + std::to_string(p.dim_v()) + "_" : "_dany_";
  *expected = target + "*" + dims + "*";
  const std::string id(plan.kernel_id());
  return id.rfind(target, 0) == 0 && id.find(dims) != std::string::npos;
}

bool cuda_serves(const Problem& p) {
  const auto is_plain = [](KvFormat format) { return format <= KvFormat::bf16; };
  return is_plain(p.k_format) && is_plain(p.v_format) && p.layout == KvLayout::strided && p.mask == MaskKind::none &&
         p.softcap == 0.0F && !p.has_alibi && !p.has_segments && p.head_dim_qk % 8 == 0 && p.dim_v() % 8 == 0;
}

double weight_roundoff(const Plan& plan, const Inputs& inputs) {
  const Problem& p = plan.problem();
  if (plan.device().backend == Backend::cpu) return plan.policy().pair_dot == 2 ? roundoff(DType::bf16) : 0.0;
  if (plan.device().backend != Backend::cuda || !is_16_bit_throughout(p)) return 0.0;
  if (!is_cuda_listed(p.head_dim_qk, p.dim_v())) return 0.0;
  // Rows that do not start at multiples of 16 bytes go to the other kernel.
  for (const TensorView& view : {inputs.q, inputs.k, inputs.v}) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.seq_stride % 8 == 0 &&
                         view.head_stride % 8 == 0 && view.token_stride % 8 == 0;
    if (!aligned) return 0.0;
  }
  return roundoff(p.q_dtype);
}

std::string run_case(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, const Context& context) {
  if (plan.device().backend == Backend::cuda) return run_device_case(plan, spec, tensors, context);
  tensors.reset_outputs();
  const bool flush = spec.seed % 3 == 0;
  GuardedBuffer workspace(plan.workspace_bytes(),
                          flush ? GuardedBuffer::Place::kFlushEnd : GuardedBuffer::Place::kOffset,
                          static_cast<std::size_t>(spec.seed * 7 % 256));
  workspace.fill_byte(0xff);
  attend(plan, tensors.inputs(), tensors.outputs(), workspace.data(), workspace.bytes(), context);
  if (!workspace.margins_are(0xff)) return "bytes around the workspace were written";
  return tensors.stray_writes();
}

// Per element: |out - oracle| <= u_out * |oracle| + floor * v_max and |lse - oracle| <= u_32 * |oracle| + floor, with
//   floor = 8 * 2^-24 * (sqrt(head_dim_qk) * max(1, s_max) + log2(kv_len) + 4)
// s_max, the largest |score| that matters, is bounded through the row's own lse: a row's largest score lies between
// lse - ln(kv_len) and lse. Over the whole output: rms(out - oracle) / rms(oracle) <= u_out + 1e-5 + 2^-23 * s_max, with
// 2e-6 in place of 1e-5 when K and V are float32; the last term is what float32 scores and lse of that size can resolve.
//
// CUDA's tensor-core kernel, and the CPU's with pair_dot=2, round probabilities to the 16-bit type of the cache before they
// multiply them with V, but not before they sum them: out = sum(p_j (1 + d_j) v_j) / sum(p_j) with |d_j| <= u_p, the
// type's unit roundoff (2^-8 for bf16, 2^-11 for f16). So out may be off by u_p * sum(p_j |v_j|) / sum(p_j) <= u_p * v_max more, which no cancellation in out
// makes smaller; f16 adds its subnormal step (weight_error). The relative rms error gains the same u_p: for V of mean 0, as
// here, it grows by rms(d_j) < u_p. lse keeps its tolerance. ex2.approx is off by 2 ulp, 2^-22, which floor covers 12 times.
std::string judge_oracle(const CaseSpec& spec, const CaseTensors& tensors, const core::ReferenceResult& oracle,
                         double* rel_rms_error, double u_p) {
  const Problem& p = spec.problem;
  const double u_out = roundoff(p.out_dtype);
  double largest_score = 0.0;
  double error_squares = 0.0;
  double oracle_squares = 0.0;
  std::size_t at = 0;
  std::size_t row_at = 0;
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    const std::int64_t kv_len = spec.kv_lens.empty() ? p.max_kv_len : spec.kv_lens[static_cast<std::size_t>(seq)];
    const auto keys = static_cast<double>(std::max<std::int64_t>(kv_len, 1));
    const double rounding = weight_error(u_p, p.q_dtype, keys);
    for (std::int64_t head = 0; head < p.num_q_heads; ++head) {
      for (std::int64_t row = 0; row < p.q_len; ++row) {
        const double lse = oracle.lse[row_at++];
        const double s_max = std::isfinite(lse) ? std::abs(lse) + std::log(keys) : 0.0;
        largest_score = std::max(largest_score, s_max);
        const double floor =
            0x1p-21 * (std::sqrt(static_cast<double>(p.head_dim_qk)) * std::max(1.0, s_max) + std::log2(keys) + 4.0);
        if (spec.want_lse) {
          const double got = tensors.lse_value(seq, head, row);
          const double tolerance = std::isfinite(lse) ? 0x1p-24 * std::abs(lse) + floor : 0.0;
          if (!(got == lse || std::abs(got - lse) <= tolerance)) {
            return mismatch(element("lse", seq, head, row, -1), got, lse, tolerance);
          }
        }
        for (std::int64_t dim = 0; dim < p.dim_v(); ++dim) {
          const double want = oracle.out[at++];
          const double got = tensors.out_value(seq, head, row, dim);
          const double tolerance = std::isfinite(lse) ? u_out * std::abs(want) + (floor + rounding) * spec.v_max : 0.0;
          if (!(std::abs(got - want) <= tolerance)) {
            return mismatch(element("out", seq, head, row, dim), got, want, tolerance);
          }
          error_squares += (got - want) * (got - want);
          oracle_squares += want * want;
        }
      }
    }
  }
  *rel_rms_error = oracle_squares > 0.0 ? std::sqrt(error_squares / oracle_squares) : 0.0;
  const bool all_f32 = p.k_format == KvFormat::f32 && p.v_format == KvFormat::f32;
  const double limit = u_out + (all_f32 ? 2e-6 : 1e-5) + 0x1p-23 * largest_score + u_p;
  if (*rel_rms_error > limit) return mismatch("relative rms error", *rel_rms_error, 0.0, limit);
  return {};
}

std::string judge_exact(const CaseSpec& spec, const CaseTensors& tensors, const ExpectedFn& expected, double u_p) {
  const Problem& p = spec.problem;
  const double rounding = weight_error(u_p, p.q_dtype, static_cast<double>(p.max_kv_len));
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (std::int64_t head = 0; head < p.num_q_heads; ++head) {
      for (std::int64_t row = 0; row < p.q_len; ++row) {
        for (std::int64_t dim = 0; dim < p.dim_v(); ++dim) {
          const double exact = expected(seq, head, row, dim);
          const double want = round_to(p.out_dtype, exact);
          const double got = tensors.out_value(seq, head, row, dim);
          double tolerance = p.out_dtype == DType::f32 ? 1e-6 * std::abs(exact) : 0.0;
          if (u_p > 0.0) tolerance += (rounding + roundoff(p.out_dtype)) * std::abs(exact);
          if (!(std::abs(got - want) <= tolerance)) {
            return mismatch(element("out", seq, head, row, dim), got, want, tolerance);
          }
        }
      }
    }
  }
  return {};
}

CaseResult check_oracle(const CaseSpec& spec, const Device& device) {
  return run_and_judge(spec, device, [&spec](const Plan& plan, CaseTensors& tensors, CaseResult& result) {
    const auto oracle = core::reference_attend(spec.problem, tensors.inputs());
    return judge_oracle(spec, tensors, oracle, &result.rel_rms_error, weight_roundoff(plan, tensors.inputs()));
  });
}

CaseResult check_exact(const CaseSpec& spec, const Device& device, const ExpectedFn& expected, Weights weights) {
  return run_and_judge(spec, device, [&](const Plan& plan, CaseTensors& tensors, CaseResult&) {
    const double u_p = weights == Weights::any ? weight_roundoff(plan, tensors.inputs()) : 0.0;
    return judge_exact(spec, tensors, expected, u_p);
  });
}

}  // namespace kvonce::conformance
