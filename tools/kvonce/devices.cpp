// kvonce devices: every backend and target, and why the missing ones are missing.
#include <fmt/format.h>

#include <optional>
#include <string>
#include <vector>

#include "kvonce/commands.hpp"
#include "kvonce/output.hpp"
#include "kvonce/plan.hpp"

namespace kvonce::tool {
namespace {

// The target that runs when none is named; empty when KVONCE_CPU_TARGET or KVONCE_NUM_THREADS prevents a choice, since
// this command is where one looks up what to set them to.
std::string default_target() {
  try {
    return default_device().target;
  } catch (const Error&) {
    return "";
  }
}

nlohmann::json bytes_or_null(std::int64_t bytes) { return bytes > 0 ? nlohmann::json(bytes) : nlohmann::json(); }

nlohmann::json text_or_null(const std::string& text) { return text.empty() ? nlohmann::json() : nlohmann::json(text); }

Table device_table() {
  Table table;
  table.columns = {"backend",  "target",   "usable",   "default", "threads",
                   "l1_bytes", "l2_bytes", "l3_bytes", "name",    "why_missing"};
  const std::string chosen = default_target();
  for (const Device& device : devices()) {
    const bool usable = device.unavailable.empty();
    const bool is_default = usable && device.backend == Backend::cpu && device.target == chosen;
    table.rows.push_back({std::string(to_string(device.backend)), text_or_null(device.target), usable, is_default,
                          usable ? nlohmann::json(device.num_threads) : nlohmann::json(),
                          bytes_or_null(device.l1_bytes), bytes_or_null(device.l2_bytes),
                          bytes_or_null(device.l3_bytes), text_or_null(device.name), text_or_null(device.unavailable)});
  }
  return table;
}

struct KernelList {
  std::vector<std::string> formats;
  std::vector<int> row_tiles;
  std::vector<std::string> head_dims;
};

KernelList kernel_list() {
  KernelList list;
#define KVONCE_FORMAT(name) list.formats.emplace_back(#name);
#define KVONCE_ROW_TILE(rows) list.row_tiles.push_back(rows);
#define KVONCE_HEAD_DIMS(qk, v) list.head_dims.emplace_back((qk) == (v) ? "d" #qk : "d" #qk "x" #v);
#include "shared/instances.def"
  return list;
}

}  // namespace

void run_devices(Format format) {
  const Table table = device_table();
  if (format == Format::csv) {
    print(render(table, format));
    return;
  }
  const KernelList kernels = kernel_list();
  if (format == Format::json) {
    nlohmann::ordered_json document;
    document["schema"] = "kvonce.devices/1";
    document["kvonce_version"] = version();
    document["devices"] = to_json(table);
    document["kernels"] = {{"kv_formats", kernels.formats},
                           {"row_tiles", kernels.row_tiles},
                           {"head_dims", kernels.head_dims},
                           {"generic_head_dims", "any up to 1024"}};
    print(document.dump(2) + '\n');
    return;
  }
  print(render(table, format) +
        fmt::format("\nkvonce {}. Kernels of every CPU target: K and V in {}; head dims {}, any other up to 1024 by "
                    "the slower generic kernel (dany); row tiles {} to {}.\n",
                    version(), fmt::join(kernels.formats, ", "), fmt::join(kernels.head_dims, " "),
                    kernels.row_tiles.front(), kernels.row_tiles.back()));
}

}  // namespace kvonce::tool
