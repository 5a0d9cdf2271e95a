// The ggml that loaded this library: its functions, found at run time, and whether its tensors are those of the headers.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <string>

namespace kvonce::ggml {

/// Functions of the host's libraries. Nothing is linked: several ggmls may be in one process, and the one that called is
/// the one whose graphs are computed.
struct Host {
  decltype(&::ggml_version) version = nullptr;
  decltype(&::ggml_op_name) op_name = nullptr;
  decltype(&::ggml_graph_n_nodes) graph_n_nodes = nullptr;
  decltype(&::ggml_graph_node) graph_node = nullptr;
  decltype(&::ggml_backend_cpu_buffer_type) cpu_buffer_type = nullptr;
  decltype(&::ggml_backend_cpu_buffer_from_ptr) cpu_buffer_from_ptr = nullptr;
  decltype(&::ggml_backend_buft_is_host) buft_is_host = nullptr;
  decltype(&::ggml_backend_buffer_get_type) buffer_get_type = nullptr;

  decltype(&::ggml_backend_reg_by_name) reg_by_name = nullptr;
  decltype(&::ggml_backend_reg_get_proc_address) reg_function = nullptr;
};

/// The OpenMP runtime of ggml's CPU backend, null where that was built without: libgomp's entry points, which LLVM's
/// runtime has too.
struct Team {
  void (*run)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags) = nullptr;
  int (*thread)() = nullptr;
  int (*size)() = nullptr;
};

/// Fills `host` from the shared object that holds `address`, and what it depends on. Returns why it cannot be served, or
/// an empty string.
std::string find_host(const void* address, Host& host);

/// To be called when the host has a CPU backend, which may be a library that it has loaded later than this one.
Team find_team(const Host& host);

}  // namespace kvonce::ggml
