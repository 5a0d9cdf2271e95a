#include "host.hpp"

#include <dlfcn.h>

#include <string_view>

namespace kvonce::ggml {
namespace {

constexpr std::string_view kBuiltFor = "this libggml-kvonce was built for ggml " KVONCE_GGML_VERSION;

template <typename Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

/// Not a leak: the host stays loaded, and the handle is what look-ups in it need.
void* open_object_of(const void* address, std::string& name) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return nullptr;
  name = info.dli_fname;
  void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(nullptr, RTLD_LAZY);  // the main program, with ggml inside
  return library;
}

}  // namespace

std::string find_host(const void* address, Host& host) {
  std::string name = "an unknown object";
  void* library = open_object_of(address, name);
  if (library == nullptr || !look_up(library, "ggml_version", host.version) ||
      !look_up(library, "ggml_op_name", host.op_name)) {
    return "ggml_backend_init was called by " + name +
           ", which has no ggml_version() that others can call: ggml has to be a shared library there (cmake -D "
           "BUILD_SHARED_LIBS=ON); " +
           std::string(kBuiltFor);
  }
  const std::string_view version = host.version();
  if (version != KVONCE_GGML_VERSION) {
    return name + " is ggml " + std::string(version) + "; " + std::string(kBuiltFor) +
           "; build it again from the headers of that ggml";
  }
  const std::string_view op = host.op_name(GGML_OP_FLASH_ATTN_EXT);
  if (op != "FLASH_ATTN_EXT") {
    return name + " calls operation " + std::to_string(GGML_OP_FLASH_ATTN_EXT) + " '" + std::string(op) +
           "', the headers call it FLASH_ATTN_EXT; " + std::string(kBuiltFor) + " with other operations";
  }
  if (!look_up(library, "ggml_graph_n_nodes", host.graph_n_nodes) ||
      !look_up(library, "ggml_graph_node", host.graph_node) ||
      !look_up(library, "ggml_backend_cpu_buffer_type", host.cpu_buffer_type) ||
      !look_up(library, "ggml_backend_cpu_buffer_from_ptr", host.cpu_buffer_from_ptr) ||
      !look_up(library, "ggml_backend_buft_is_host", host.buft_is_host) ||
      !look_up(library, "ggml_backend_buffer_get_type", host.buffer_get_type) ||
      !look_up(library, "ggml_backend_reg_by_name", host.reg_by_name) ||
      !look_up(library, "ggml_backend_reg_get_proc_address", host.reg_function)) {
    return name + " lacks functions of ggml-backend.h; " + std::string(kBuiltFor);
  }
  return {};
}

Team find_team(const Host& host) {
  ggml_backend_reg_t cpu = host.reg_by_name("CPU");
  const void* address = cpu == nullptr ? nullptr : host.reg_function(cpu, "ggml_backend_set_n_threads");
  std::string name;
  void* library = address == nullptr ? nullptr : open_object_of(address, name);
  Team team;
  if (library == nullptr || !look_up(library, "GOMP_parallel", team.run) ||
      !look_up(library, "omp_get_thread_num", team.thread) || !look_up(library, "omp_get_num_threads", team.size)) {
    return {};
  }
  return team;
}

}  // namespace kvonce::ggml
