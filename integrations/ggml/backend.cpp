// libggml-kvonce.so: an accelerator device, as ggml's BLAS backend is one, that claims attention of few query tokens to a
// cache in host memory and leaves everything else to ggml's CPU backend.
#include <ggml-backend-impl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <kvonce/plan_cache.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "host.hpp"
#include "huge_pages.hpp"
#include "kvonce_ggml.h"
#include "op.hpp"
#include "statistics.hpp"

namespace kvonce::ggml {
namespace {

Host host;
Team team;
std::once_flag team_is_known;
thread_local std::string init_error;

/// What one ggml_backend_t keeps between graphs. ggml runs one graph at a time on it.
struct Stream {
  int num_threads = GGML_DEFAULT_N_THREADS;
  std::optional<Device> device;  // with num_threads, made when first needed
  std::vector<std::int32_t> kv_starts;
  std::vector<std::int32_t> kv_lens;
  std::vector<float> slopes;
  float slopes_max_bias = 0.0F;
  HugePages huge_pages;
  std::unique_ptr<std::byte[]> workspace;
  std::size_t workspace_bytes = 0;
};

// --- plans

/// A model asks the same once per layer and token; its cache grows by a few cells at a time.
PlanCache& plans() {
  static PlanCache cache;
  return cache;
}

const Device& device_of(Stream& stream) {
  if (!stream.device) stream.device = cpu_device(default_device().target, stream.num_threads);
  return *stream.device;
}

// --- the host's threads

struct TeamWork {
  std::int64_t count;
  void (*body)(void*, std::int64_t);
  void* context;
};

void team_main(void* data) {
  const auto& work = *static_cast<const TeamWork*>(data);
  const int step = team.size();
  for (std::int64_t i = team.thread(); i < work.count; i += step) work.body(work.context, i);
}

/// ggml's own regions have num_threads threads: a smaller one here would make the runtime end the others and start new
/// ones for ggml's next.
void run_on_team(void* stream, std::int64_t count, void (*body)(void*, std::int64_t), void* context) {
  TeamWork work{count, body, context};
  team.run(team_main, &work, static_cast<unsigned>(static_cast<Stream*>(stream)->num_threads), 0);
}

// --- computing

void attend_node(Stream& stream, const ggml_tensor& node) {
  Problem problem;
  if (const char* reason = read_problem(host, node, problem)) throw Error(ErrorCode::Unsupported, reason);
  const std::shared_ptr<CachedPlan> found = plans().find(problem, device_of(stream), plan_options(problem));
  const Plan& plan = found->plan;
  if (stream.workspace_bytes < plan.workspace_bytes()) {
    stream.workspace_bytes = 0;
    stream.workspace = std::make_unique_for_overwrite<std::byte[]>(plan.workspace_bytes());
    stream.workspace_bytes = plan.workspace_bytes();
  }
  Inputs in = inputs_of(node);
  // Padding and what a window has left behind is not even looked at; holes between are the mask's.
  stream.kv_starts.clear();
  stream.kv_lens.clear();
  for (std::int64_t seq = 0; seq < problem.num_seqs; ++seq) {
    const Cells cells = visible_cells(node, seq);
    stream.kv_starts.push_back(cells.begin);
    stream.kv_lens.push_back(cells.end);
    for (const ggml_tensor* cache : {node.src[1], node.src[2]}) {
      stream.huge_pages.visit(static_cast<const char*>(cache->data) + static_cast<std::size_t>(seq) * cache->nb[3],
                              static_cast<std::size_t>(cells.end) * cache->nb[1]);
    }
  }
  in.kv_starts = stream.kv_starts.data();
  in.kv_lens = stream.kv_lens.data();
  if (problem.has_mask_slopes) {
    const auto num_heads = static_cast<std::size_t>(problem.num_q_heads);
    if (stream.slopes.size() != num_heads || stream.slopes_max_bias != max_bias_of(node)) {
      stream.slopes.resize(num_heads);
      stream.slopes_max_bias = max_bias_of(node);
      fill_slopes(stream.slopes_max_bias, problem.num_q_heads, stream.slopes.data());
    }
    in.mask_slopes = stream.slopes.data();
  }
  Context context;
  context.num_threads = stream.num_threads;
  if (team.run != nullptr) {
    context.parallel_for = run_on_team;
    context.parallel_for_host = &stream;
  }
  attend(plan, in, outputs_of(node), stream.workspace.get(), stream.workspace_bytes, context);
  count_served(plan.kernel_id(), problem.num_seqs * problem.q_len);
}

bool computes_nothing(ggml_op op) {
  return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE ||
         op == GGML_OP_TRANSPOSE;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) {
  Stream& stream = *static_cast<Stream*>(backend->context);
  for (int i = 0; i < host.graph_n_nodes(graph); ++i) {
    const ggml_tensor& node = *host.graph_node(graph, i);
    if ((node.flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || computes_nothing(node.op)) continue;
    try {
      if (node.op != GGML_OP_FLASH_ATTN_EXT) {
        throw Error(ErrorCode::Unsupported, std::string(host.op_name(node.op)) + " is not served");
      }
      attend_node(stream, node);
    } catch (const std::exception& error) {
      count_failed();
      std::fprintf(stderr, "kvonce for ggml: node '%s': %s\n", node.name, error.what());
      return GGML_STATUS_FAILED;
    }
  }
  return GGML_STATUS_SUCCESS;
}

// --- backend

const char* backend_name(ggml_backend_t /*backend*/) { return "kvonce"; }

void free_backend(ggml_backend_t backend) {
  delete static_cast<Stream*>(backend->context);
  delete backend;
}

void set_n_threads(ggml_backend_t backend, int num_threads) {
  Stream& stream = *static_cast<Stream*>(backend->context);
  if (stream.num_threads == std::max(1, num_threads)) return;
  stream.num_threads = std::max(1, num_threads);
  stream.device.reset();
}

ggml_guid_t guid() {
  static ggml_guid id = {0x6b, 0x76, 0x6f, 0x6e, 0x63, 0x65, 0x2d, 0x67,
                         0x67, 0x6d, 0x6c, 0x2d, 0x61, 0x74, 0x74, 0x6e};  // "kvonce-ggml-attn"
  return &id;
}

ggml_backend_t new_backend(ggml_backend_dev_t device, const char* /*params*/) {
  std::call_once(team_is_known, [] {
    team = find_team(host);
    note_threads(team.run != nullptr);
  });
  auto stream = std::make_unique<Stream>();
  auto backend = std::make_unique<ggml_backend>();
  backend->guid = guid();
  backend->iface.get_name = backend_name;
  backend->iface.free = free_backend;
  backend->iface.graph_compute = compute;
  backend->device = device;
  backend->context = stream.release();
  return backend.release();
}

// --- device

const char* device_name(ggml_backend_dev_t /*device*/) { return "kvonce"; }
const char* device_description(ggml_backend_dev_t /*device*/) { return "decode attention that reads K and V once"; }

void device_memory(ggml_backend_dev_t /*device*/, size_t* free, size_t* total) {
  *free = 0;  // the host's; none of its own to report
  *total = 0;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t /*device*/) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = device_name(device);
  props->description = device_description(device);
  props->type = device_type(device);
  props->caps.buffer_from_host_ptr = true;
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t /*device*/) { return host.cpu_buffer_type(); }

ggml_backend_buffer_t device_buffer_from_host_ptr(ggml_backend_dev_t /*device*/, void* data, size_t bytes,
                                                  size_t /*max_tensor_bytes*/) {
  return host.cpu_buffer_from_ptr(data, bytes);
}

bool device_supports_op(ggml_backend_dev_t /*device*/, const ggml_tensor* node) {
  if (computes_nothing(node->op)) return true;
  if (node->op != GGML_OP_FLASH_ATTN_EXT) return false;
  Problem problem;
  if (const char* reason = read_problem(host, *node, problem)) {
    count_declined(reason);
    return false;
  }
  try {
    static const Device device = default_device();
    static_cast<void>(plans().find(problem, device, plan_options(problem)));
    note_claimed();
    return true;
  } catch (const Error& error) {
    count_declined(error.what());
    return false;
  }
}

bool device_supports_buft(ggml_backend_dev_t /*device*/, ggml_backend_buffer_type_t type) {
  return host.buft_is_host(type);
}

// --- registry

const char* registry_name(ggml_backend_reg_t /*registry*/) { return "kvonce"; }
size_t registry_device_count(ggml_backend_reg_t /*registry*/) { return 1; }

ggml_backend_dev_t registry_device(ggml_backend_reg_t registry, size_t /*idx*/) {
  static ggml_backend_device device = [registry] {
    ggml_backend_device made{};
    made.iface.get_name = device_name;
    made.iface.get_description = device_description;
    made.iface.get_memory = device_memory;
    made.iface.get_type = device_type;
    made.iface.get_props = device_props;
    made.iface.init_backend = new_backend;
    made.iface.get_buffer_type = device_buffer_type;
    made.iface.buffer_from_host_ptr = device_buffer_from_host_ptr;
    made.iface.supports_op = device_supports_op;
    made.iface.supports_buft = device_supports_buft;
    made.reg = registry;
    return made;
  }();
  return &device;
}

void* registry_function(ggml_backend_reg_t /*registry*/, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) return reinterpret_cast<void*>(set_n_threads);
  return nullptr;
}

}  // namespace
}  // namespace kvonce::ggml

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  using namespace kvonce::ggml;
  static ggml_backend_reg registry{};
  Host found;
  init_error = find_host(__builtin_return_address(0), found);
  if (init_error.empty() && registry.api_version != 0 && found.version != host.version) {
    init_error = "another ggml of this process has loaded this libggml-kvonce already; load a copy of the file";
  }
  if (!init_error.empty()) {
    std::fprintf(stderr, "kvonce for ggml: not loaded: %s\n", init_error.c_str());
    return nullptr;
  }
  if (registry.api_version != 0) return &registry;  // ggml_backend_load_all() again, perhaps while graphs run
  start_statistics();
  host = found;
  registry.api_version = GGML_BACKEND_API_VERSION;
  registry.iface.get_name = registry_name;
  registry.iface.get_device_count = registry_device_count;
  registry.iface.get_device = registry_device;
  registry.iface.get_proc_address = registry_function;
  return &registry;
}

const char* kvonce_ggml_error() { return kvonce::ggml::init_error.c_str(); }
