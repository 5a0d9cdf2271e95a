#include "emulated_case.hpp"

#include <cstring>
#include <vector>

#include "core/reference.hpp"
#include "guarded_buffer.hpp"

namespace kvonce::emulation {

using conformance::CaseResult;
using conformance::CaseSpec;
using conformance::CaseTensors;
using conformance::GuardedBuffer;

Body BodyDevice::of(const Device& device) {
  for (const Body body : {Body::vector, Body::matrix, Body::per_head}) {
    if (device.target == to_string(body)) return body;
  }
  throw Error(ErrorCode::InvalidArgument, "no body is called " + device.target);
}

Device BodyDevice::device(Body body) {
  Device device = cpu_device("portable");
  device.target = to_string(body);
  return device;
}

std::string run_emulated(const CaseSpec& spec, CaseTensors& tensors, const Choice& choice) {
  const Problem& p = spec.problem;
  tensors.reset_outputs();
  const Launch launch = make_launch(p, tensors.inputs(), choice);
  const std::size_t element = p.out_dtype == DType::f32 ? 4 : 2;
  const auto row_bytes = static_cast<std::size_t>(p.dim_v()) * element;
  GuardedBuffer out(static_cast<std::size_t>(launch.num_rows) * row_bytes, GuardedBuffer::Place::kFlushEnd);
  GuardedBuffer lse(static_cast<std::size_t>(launch.num_rows) * 4, GuardedBuffer::Place::kFlushEnd);
  out.fill_byte(0xff);
  lse.fill_byte(0xff);
  std::vector<Region> regions;
  for (const GuardedBuffer* buffer : tensors.input_buffers())
    regions.push_back({buffer->mapped(), buffer->mapped_bytes()});
  const std::string stray = run_launch(launch, tensors.inputs(), choice.order_seed, out.data(),
                                       reinterpret_cast<float*>(lse.data()), nullptr, regions);
  if (!stray.empty()) return stray;
  if (!out.margins_are(0xff) || !lse.margins_are(0xff)) return "bytes before out or lse were written";
  const Outputs& to = tensors.outputs();
  std::size_t row = 0;
  for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (std::int64_t head = 0; head < p.num_q_heads; ++head) {
      for (std::int64_t query = 0; query < p.q_len; ++query, ++row) {
        const std::int64_t at = seq * to.out_seq_stride + head * to.out_head_stride + query * to.out_token_stride;
        std::memcpy(static_cast<unsigned char*>(to.out) + static_cast<std::size_t>(at) * element,
                    out.data() + row * row_bytes, row_bytes);
        if (to.lse == nullptr) continue;
        const std::int64_t lse_at = seq * to.lse_seq_stride + head * to.lse_head_stride + query * to.lse_token_stride;
        std::memcpy(to.lse + lse_at, lse.data() + row * 4, 4);
      }
    }
  }
  return tensors.stray_writes();
}

namespace {

template <typename Judge>
CaseResult run_and_judge(const CaseSpec& spec, const Choice& choice, Judge judge) {
  CaseResult result;
  result.name = spec.name;
  result.status = CaseResult::failed;
  result.kernel_id = to_string(choice.body);
  CaseTensors tensors(spec);
  result.detail = run_emulated(spec, tensors, choice);
  if (result.detail.empty()) result.detail = judge(tensors, result);
  if (result.detail.empty()) result.status = CaseResult::passed;
  return result;
}

}  // namespace

CaseResult check_emulated(const CaseSpec& spec, const Choice& choice) {
  return run_and_judge(spec, choice, [&spec](const CaseTensors& tensors, CaseResult& result) {
    const auto oracle = core::reference_attend(spec.problem, tensors.inputs());
    return judge_oracle(spec, tensors, oracle, &result.rel_rms_error);
  });
}

}  // namespace kvonce::emulation

namespace kvonce::conformance {

CaseResult check_exact_emulated(const CaseSpec& spec, const Device& device, const ExpectedFn& expected, Weights) {
  CaseResult result;
  result.name = spec.name;
  result.detail = emulation::why_not_served(spec.problem);
  if (!result.detail.empty()) return result;
  try {
    const emulation::Choice choice = emulation::choose(spec, emulation::BodyDevice::of(device));
    return emulation::run_and_judge(
        spec, choice, [&](const CaseTensors& tensors, CaseResult&) { return judge_exact(spec, tensors, expected); });
  } catch (const Error& error) {
    result.detail = error.what();
    result.status = error.code() == ErrorCode::Unsupported ? CaseResult::skipped : CaseResult::failed;
    return result;
  }
}

namespace {
emulation::Body planned_body;
}

Plan plan_case_emulated(const CaseSpec& spec, const Device& device) {
  planned_body = emulation::BodyDevice::of(device);
  return make_plan(spec.problem, cpu_device("portable"));
}

std::string run_case_emulated(const Plan&, const CaseSpec& spec, CaseTensors& tensors, const Context&) {
  return emulation::run_emulated(spec, tensors, emulation::choose(spec, planned_body));
}

}  // namespace kvonce::conformance
