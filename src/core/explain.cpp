#include <cstdio>
#include <string>

#include "core/plan_data.hpp"

namespace kvonce {
namespace {

std::string with_unit(double bytes) {
  const char* const units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  std::size_t unit = 0;
  while (bytes >= 1000.0 && unit + 1 < sizeof units / sizeof units[0]) {
    bytes /= 1000.0;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
  return text;
}

std::string formats(const Problem& p) {
  std::string text = "q " + std::string(to_string(p.q_dtype)) + ", k " + std::string(to_string(p.k_format)) + ", v " +
                     std::string(to_string(p.v_format)) + ", out " + std::string(to_string(p.out_dtype));
  if (p.quant_group > 0) {
    text += ", scales and biases " + std::string(to_string(p.scales_dtype)) + " per " + std::to_string(p.quant_group) +
            " values";
  }
  return text;
}

std::string device_text(const Device& d) {
  std::string text = std::string(to_string(d.backend)) + " " + d.target;
  if (d.backend != Backend::metal) return text + ", " + std::to_string(d.num_threads) + " threads, " + d.name;
  text += d.num_sms > 0 ? ", " + std::to_string(d.num_sms) + " cores" : ", number of cores unknown";
  return text + (d.name.empty() ? "" : ", " + d.name);
}

}  // namespace

std::string Plan::explain() const {
  const core::PlanData& d = *data_;
  const Problem& p = d.problem;
  std::string text;
  const auto line = [&text](const std::string& name, const std::string& value) {
    text += name + std::string(name.size() < 16 ? 16 - name.size() : 1, ' ') + value + "\n";
  };
  line("problem", std::to_string(p.num_q_heads) + "q/" + std::to_string(p.num_kv_heads) + "kv (group " +
                      std::to_string(p.group_size()) + ") d" + std::to_string(p.head_dim_qk) + "x" +
                      std::to_string(p.head_dim_v) + ", up to " + std::to_string(p.max_kv_len) + " tokens, q_len " +
                      std::to_string(p.q_len) + ", " + std::to_string(p.num_seqs) + " sequences, " +
                      (p.causal ? "causal" : "not causal") +
                      (p.window > 0 ? ", window " + std::to_string(p.window) : std::string()));
  line("formats", formats(p));
  line("device", device_text(d.device));
  line("kernel", d.kernel_id);
  line("policy", to_string(d.policy));
  if (!d.policy_origin.empty()) line("policy from", d.policy_origin);
  line("rows", std::to_string(d.rows_per_stream) + " rows read each KV stream, in " + std::to_string(d.row_blocks) +
                   " block(s) of up to " + std::to_string(d.policy.rows_per_worker));
  line("read factor", std::to_string(d.row_blocks));
  line("chunks", "up to " + std::to_string(d.max_chunks) + " of " + std::to_string(d.policy.chunk_tokens) +
                     " tokens per KV stream");
  line("workspace", with_unit(static_cast<double>(d.workspace.total_bytes)));
  const double bytes = static_cast<double>(max_kv_bytes()) * static_cast<double>(d.row_blocks);
  line("bytes", with_unit(bytes) + " of K and V at " + std::to_string(p.max_kv_len) + " tokens");
  if (!d.prediction.empty()) line("prediction", d.prediction);
  if (d.device.read_gbps > 0.0) {
    char time[64];
    std::snprintf(time, sizeof time, "%.1f us at %.1f GB/s", bytes / d.device.read_gbps * 1e-3, d.device.read_gbps);
    line("time at read", time);
  } else if (d.prediction.empty()) {
    line("time at read", "unknown: the device's read bandwidth has not been measured (Device::read_gbps)");
  }
  for (const std::string& reason : d.rejected) line("rejected", reason);
  return text;
}

}  // namespace kvonce
