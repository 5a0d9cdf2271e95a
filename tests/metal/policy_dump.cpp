// Plans for the problems on standard input, one per line, and prints every field of the decision or the refusal.
// In:  num_seqs q_len num_q_heads num_kv_heads head_dim_qk head_dim_v max_kv_len window dtype kv_format quant_group target num_cores
//      threadgroup_bytes max_threads read_gbps body row_tile rows_per_worker chunk_tokens step_tokens splits simdgroups
// Out: name=value, tab, ...; or error=CODE, tab, message=TEXT
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "kvonce/kvonce.hpp"
#include "metal/metal_plan.hpp"

namespace {

using kvonce::metal::Decision;

void print(const kvonce::Plan& plan) {
  const auto* metal = dynamic_cast<const kvonce::metal::MetalPlan*>(plan.data().backend_plan.get());
  const Decision& d = metal->decision;
  const kvonce::Problem& p = plan.problem();
  std::ostringstream out;
  out << "kernel_id=" << plan.kernel_id() << "\tbody=" << to_string(d.body);
  const std::pair<const char*, std::int64_t> numbers[] = {
      {"row_tile", d.row_tile},
      {"rows_per_worker", d.rows_per_worker},
      {"row_blocks", d.row_blocks},
      {"read_factor", plan.read_factor()},
      {"row_tiles", d.row_tiles},
      {"token_parts", d.token_parts},
      {"num_chunks", d.num_chunks},
      {"fixed_chunk_tokens", d.fixed_chunk_tokens},
      {"chunk_tokens", plan.policy().chunk_tokens},
      {"step_tokens", d.step_tokens},
      {"threads", d.threads},
      {"threadgroup_bytes", d.threadgroup_bytes},
      {"merge_simdgroups", d.merge_simdgroups},
      {"merge_threadgroup_bytes", d.merge_threadgroup_bytes},
      {"live_floats", d.live_floats},
      {"slots", d.slots},
      {"workspace_bytes", static_cast<std::int64_t>(plan.workspace_bytes())},
  };
  for (const auto& [name, value] : numbers) out << '\t' << name << '=' << value;
  out << "\tthreadgroups=(" << d.num_chunks << ", " << p.num_kv_heads * d.row_blocks << ", " << p.num_seqs << ')';
  out << "\tmerge_threadgroups=(" << d.merge_threadgroups << ", 1, 1)";
  char predicted[64];
  std::snprintf(predicted, sizeof predicted, "%.17g", d.predicted_us);
  out << "\tpredicted_us=" << predicted;
  for (const std::string& reason : d.rejected) out << "\trejected=" << reason;
  std::cout << out.str() << '\n';
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    kvonce::Problem p;
    kvonce::Device device;
    device.backend = kvonce::Backend::metal;
    kvonce::PlanOptions options;
    kvonce::Policy& policy = options.policy;
    std::string dtype;
    std::string kv_format;
    std::istringstream in(line);
    in >> p.num_seqs >> p.q_len >> p.num_q_heads >> p.num_kv_heads >> p.head_dim_qk >> p.head_dim_v >> p.max_kv_len >>
        p.window >> dtype >> kv_format >> p.quant_group >> device.target >> device.num_sms >>
        device.threadgroup_bytes >> device.max_threadgroup_threads >> device.read_gbps >> policy.body >>
        policy.row_tile >> policy.rows_per_worker >> policy.chunk_tokens >> policy.step_tokens >> policy.splits >>
        policy.simdgroups;
    if (!in) {
      std::cerr << "not a problem: " << line << '\n';
      return 2;
    }
    for (const kvonce::DType known : {kvonce::DType::f32, kvonce::DType::f16, kvonce::DType::bf16}) {
      if (to_string(known) == dtype) p.q_dtype = p.out_dtype = known;
    }
    p.k_format = p.v_format = static_cast<kvonce::KvFormat>(p.q_dtype);
    for (const kvonce::KvFormat affine : {kvonce::KvFormat::mlx_int8, kvonce::KvFormat::mlx_int4}) {
      if (to_string(affine) != kv_format) continue;
      p.k_format = p.v_format = affine;
      p.scales_dtype = p.q_dtype;
    }
    try {
      print(make_plan(p, device, options));
    } catch (const kvonce::Error& error) {
      std::cout << "error=" << static_cast<int>(error.code()) << "\tmessage=" << error.what() << '\n';
    }
  }
  return 0;
}
