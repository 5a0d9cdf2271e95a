#include "kvonce/report.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvonce::tool {
namespace {

template <class T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json cuda_device_json(const BenchDevice& device) {
  return {
      {"name", device.name},
      {"cuda_target", device.target},
      {"num_sms", device.num_sms},
      {"l2_bytes", device.l2_bytes},
      {"clock_ghz", device.clock_ghz},
      {"memory_gbps", device.memory_gbps},
      {"driver_cuda", device.driver_cuda},
      {"runtime_cuda", device.runtime_cuda},
      {"read_gbps", device.read_gbps},
      {"read_loop", device.read_loop},
      {"buffer_bytes", device.buffer_bytes},
  };
}

nlohmann::ordered_json device_json(const BenchDevice& device) {
  if (device.backend == Backend::cuda) return cuda_device_json(device);
  nlohmann::ordered_json json = {
      {"name", device.name},
      {"cpu_target", device.target},
      {"threads", device.threads},
      {"l1_bytes", device.l1_bytes},
      {"l2_bytes", device.l2_bytes},
      {"l3_bytes", device.l3_bytes},
      {"clock_ghz", device.clock_ghz},
      {"read_gbps", device.read_gbps},
      {"read_loop", device.read_loop},
      {"madd_per_s", device.madd_per_s},
      {"madd_per_s_thread", device.madd_per_s_thread},
      {"madd_instr_per_cycle", device.madd_instr_per_cycle},
      {"exp_per_s", device.exp_per_s},
      {"exp_per_s_thread", device.exp_per_s_thread},
      {"buffer_bytes", device.buffer_bytes},
  };
  json["madd_bf16_per_s"] = or_null(device.madd_bf16_per_s);
  json["madd_bf16_per_s_thread"] = or_null(device.madd_bf16_per_s_thread);
  json["madd_bf16_instr_per_cycle"] = or_null(device.madd_bf16_instr_per_cycle);
  return json;
}

nlohmann::ordered_json row_json(const BenchRow& row) {
  nlohmann::ordered_json json = {
      {"case", row.case_text},
      {"num_q_heads", row.num_q_heads},
      {"num_kv_heads", row.num_kv_heads},
      {"head_dim_qk", row.head_dim_qk},
      {"head_dim_v", row.head_dim_v},
      {"kv_len", row.kv_len},
      {"q_len", row.q_len},
      {"num_seqs", row.num_seqs},
      {"kv_dtype", row.kv_dtype},
      {"backend", row.backend},
      {"q_dtype", row.q_dtype},
      {"mode", row.chain ? "chain" : "isolated"},
      {"arm", row.arm},
      {"kernel", row.kernel},
      {"read_factor", row.read_factor},
      {"us_median", row.us_median},
      {"us_min", row.us_min},
      {"kv_bytes", row.kv_bytes},
      {"gbps", row.gbps},
      {"ratio_to_read", or_null(row.ratio_to_read)},
      {"roof_us", or_null(row.roof_us)},
      {"ratio_to_roof", or_null(row.ratio_to_roof)},
      {"rel_rms_error", or_null(row.rel_rms_error)},
  };
  if (row.planned_kv_len) json["planned_kv_len"] = *row.planned_kv_len;
  if (row.chain) {
    json["neighbours"] = row.chain->neighbours;
    json["chain_us_median"] = row.chain->chain_us;
    json["neighbours_us_median"] = row.chain->neighbours_us;
    json["isolated_us_median"] = row.chain->isolated_us;
    json["ratio_to_isolated"] = row.us_median / row.chain->isolated_us;
  }
  return json;
}

bool is_chain(const BenchReport& report) { return !report.rows.empty() && report.rows.front().chain.has_value(); }

std::string optional_text(const std::optional<double>& value, const char* format) {
  return value ? fmt::format(fmt::runtime(format), *value) : std::string("-");
}

std::string microseconds(double us) { return us < 100.0 ? fmt::format("{:.2f}", us) : fmt::format("{:.0f}", us); }

std::string device_line(const BenchDevice& device) {
  if (device.backend == Backend::cuda) {
    return fmt::format("{} | {} | {} SMs | {:.2f} GHz | memory {:.0f} GB/s, read up to {:.0f}\n", device.name,
                       device.target, device.num_sms, device.clock_ghz, device.memory_gbps, device.read_gbps);
  }
  return fmt::format("{} | {} | {} thread{} | {:.2f} GHz | {:.0f} Gmadd/s | {:.1f} Gexp/s\n", device.name,
                     device.target, device.threads, device.threads == 1 ? "" : "s", device.clock_ghz,
                     device.madd_per_s * 1e-9, device.exp_per_s * 1e-9);
}

Table short_table(const BenchReport& report) {
  Table table;
  table.columns = {"case", "arm", "kernel", "read factor", "us", "GB/s", "ratio_to_read", "ratio_to_roof", "error"};
  for (const BenchRow& row : report.rows) {
    table.rows.push_back({row.case_text + " " + row.kv_dtype, row.arm, row.kernel, row.read_factor,
                          microseconds(row.us_median), fmt::format("{:.1f}", row.gbps),
                          optional_text(row.ratio_to_read, "{:.2f}"), optional_text(row.ratio_to_roof, "{:.2f}"),
                          optional_text(row.rel_rms_error, "{:.1e}")});
  }
  return table;
}

// One line per case; each arm with each form of its neighbours is a column: what it adds, and that over its isolated time.
Table chain_table(const BenchReport& report) {
  const auto column_of = [](const BenchRow& row) { return row.arm + " " + row.chain->neighbours; };
  Table table;
  table.columns = {"case", "KV MB", "isolated us"};
  for (const BenchRow& row : report.rows) {
    if (column_of(row) == column_of(report.rows.front())) {
      table.rows.push_back({row.case_text + " " + row.kv_dtype,
                            fmt::format("{:.1f}", static_cast<double>(row.kv_bytes) * 1e-6),
                            microseconds(row.chain->isolated_us)});
    }
    if (table.rows.size() == 1) table.columns.push_back(column_of(row));
    table.rows.back().push_back(
        fmt::format("{} ({:.2f}x)", microseconds(row.us_median), row.us_median / row.chain->isolated_us));
  }
  return table;
}

// Every JSON key that a row has is a column.
Table full_table(const BenchReport& report) {
  Table table;
  std::vector<nlohmann::ordered_json> rows;
  for (const BenchRow& row : report.rows) {
    for (const auto& item : rows.emplace_back(row_json(row)).items()) {
      if (std::find(table.columns.begin(), table.columns.end(), item.key()) == table.columns.end()) {
        table.columns.push_back(item.key());
      }
    }
  }
  for (const nlohmann::ordered_json& row : rows) {
    std::vector<nlohmann::json>& cells = table.rows.emplace_back();
    for (const std::string& column : table.columns) {
      cells.push_back(row.contains(column) ? nlohmann::json(row[column]) : nlohmann::json());
    }
  }
  return table;
}

}  // namespace

nlohmann::ordered_json to_json(const BenchReport& report) {
  nlohmann::ordered_json json = {{"schema", "kvonce.bench/1"},
                                 {"kvonce_version", report.kvonce_version},
                                 {"device", device_json(report.device)},
                                 {"rows", nlohmann::ordered_json::array()}};
  for (const BenchRow& row : report.rows) json["rows"].push_back(row_json(row));
  return json;
}

std::string render(const BenchReport& report, Format format) {
  switch (format) {
    case Format::md:
      return render(is_chain(report) ? chain_table(report) : short_table(report), Format::md);
    case Format::csv:
      return render(full_table(report), Format::csv);
    case Format::json:
      break;
  }
  return to_json(report).dump(2) + '\n';
}

std::string render_compact(const BenchReport& report) {
  if (is_chain(report)) return device_line(report.device) + render(report, Format::md);
  // Calls on a GPU are so short that what is added to the reading counts more than the rate.
  const bool is_cuda = report.device.backend == Backend::cuda;
  std::string text = device_line(report.device);
  std::vector<std::string> arms;
  std::size_t width = 4;
  for (const BenchRow& row : report.rows) {
    if (std::find(arms.begin(), arms.end(), row.arm) == arms.end()) arms.push_back(row.arm);
    width = std::max(width, row.case_text.size() + row.kv_dtype.size() + 1);
  }
  text += fmt::format("{:<{}}", is_cuda ? "us" : "GB/s", width);
  const auto cell_width = [](const std::string& arm) { return std::max<std::size_t>(8, arm.size()); };
  for (const std::string& arm : arms) text += fmt::format(" {:>8}", arm);
  text += is_cuda ? "   of read  speed-up      error\n" : "   of roof  speed-up      error\n";
  for (std::size_t begin = 0; begin < report.rows.size();) {
    const BenchRow& first = report.rows[begin];
    const BenchRow* kvonce = nullptr;
    const BenchRow* per_head = nullptr;
    text += fmt::format("{:<{}}", first.case_text + " " + first.kv_dtype, width);
    for (const std::string& arm : arms) {
      const BenchRow& row = report.rows[begin];
      text += is_cuda ? fmt::format(" {:>{}.2f}", row.us_median, cell_width(arm)) : fmt::format(" {:>8.1f}", row.gbps);
      if (arm == "kvonce") kvonce = &row;
      if (arm == "per_head") per_head = &row;
      ++begin;
    }
    const bool both = kvonce != nullptr && per_head != nullptr;
    text += fmt::format(" {:>9} {:>9} {:>10}\n", kvonce ? optional_text(kvonce->ratio_to_roof, "{:.2f}") : "-",
                        both ? fmt::format("{:.2f}x", per_head->us_median / kvonce->us_median) : "-",
                        kvonce ? optional_text(kvonce->rel_rms_error, "{:.1e}") : "-");
  }
  return text;
}

}  // namespace kvonce::tool
