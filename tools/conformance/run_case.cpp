#include "run_case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "generator.hpp"
#include "shared/numeric.h"

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

CaseResult run_and_judge(const CaseSpec& spec, const Device& device,
                         const std::function<std::string(CaseTensors&, CaseResult&)>& judge) {
  CaseResult result;
  result.name = spec.name;
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
    if (result.detail.empty()) result.detail = judge(tensors, result);
    if (result.detail.empty()) result.status = CaseResult::passed;
  } catch (const Error& error) {
    result.detail = std::string("refused: ") + error.what();
  }
  return result;
}

}  // namespace

Plan plan_case(const CaseSpec& spec, const Device& device) {
  Device with_threads = device;
  with_threads.num_threads = spec.num_threads;
  return make_plan(spec.problem, with_threads, spec.options);
}

bool kernel_id_fits(const Plan& plan, std::string* expected) {
  const Problem& p = plan.problem();
  const std::string target = "attend_" + plan.device().target + "_";
  const std::string dims = is_listed(p.head_dim_qk, p.dim_v())
                               ? "_d" + std::to_string(p.head_dim_qk) + "x" + std::to_string(p.dim_v()) + "_"
                               : "_dany_";
  *expected = target + "*" + dims + "*";
  const std::string id(plan.kernel_id());
  return id.rfind(target, 0) == 0 && id.find(dims) != std::string::npos;
}

std::string run_case(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, const Context& context) {
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
std::string judge_oracle(const CaseSpec& spec, const CaseTensors& tensors, const core::ReferenceResult& oracle,
                         double* rel_rms_error) {
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
          const double tolerance = std::isfinite(lse) ? u_out * std::abs(want) + floor * spec.v_max : 0.0;
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
  const double limit = u_out + (all_f32 ? 2e-6 : 1e-5) + 0x1p-23 * largest_score;
  if (*rel_rms_error > limit) return mismatch("relative rms error", *rel_rms_error, 0.0, limit);
  return {};
}

std::string judge_exact(const CaseSpec& spec, const CaseTensors& tensors, const ExpectedFn& expected) {
  const Problem& p = spec.problem;
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (std::int64_t head = 0; head < p.num_q_heads; ++head) {
      for (std::int64_t row = 0; row < p.q_len; ++row) {
        for (std::int64_t dim = 0; dim < p.dim_v(); ++dim) {
          const double exact = expected(seq, head, row, dim);
          const double want = round_to(p.out_dtype, exact);
          const double got = tensors.out_value(seq, head, row, dim);
          const double tolerance = p.out_dtype == DType::f32 ? 1e-6 * std::abs(exact) : 0.0;
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
  return run_and_judge(spec, device, [&spec](CaseTensors& tensors, CaseResult& result) {
    const auto oracle = core::reference_attend(spec.problem, tensors.inputs());
    return judge_oracle(spec, tensors, oracle, &result.rel_rms_error);
  });
}

CaseResult check_exact(const CaseSpec& spec, const Device& device, const ExpectedFn& expected) {
  return run_and_judge(spec, device, [&spec, &expected](CaseTensors& tensors, CaseResult&) {
    return judge_exact(spec, tensors, expected);
  });
}

}  // namespace kvonce::conformance
