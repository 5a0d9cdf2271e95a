// What make_plan decided, as plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvonce/plan.hpp"

namespace kvonce::core {

struct BackendTable;

constexpr int kMaxThreads = 1024;

/// Byte offsets of the parts of the workspace from its 64-byte aligned base.
struct WorkspaceLayout {
  std::size_t item_starts = 0;    // int64 [num_seqs + 1]: index of each sequence's first work item
  std::size_t runs = 0;           // uint64 [num_threads], 64 bytes apart: the work items that each worker has left
  std::size_t counters = 0;       // int32 [num_streams * row_blocks]: chunks still missing before the merge
  std::size_t partial_lse = 0;    // float [num_streams, max_chunks, rows_per_stream]
  std::size_t partial_o = 0;      // float [num_streams, max_chunks, rows_per_stream, head_dim_v]
  std::size_t scratch = 0;        // num_threads times scratch_bytes
  std::size_t scratch_bytes = 0;  // one worker's q, o, scores, running maximum and sum
  std::size_t total_bytes = 0;    // with room to align the base
};

/// What a backend adds to a plan.
struct BackendPlan {
  BackendPlan() = default;
  BackendPlan(const BackendPlan&) = default;
  BackendPlan& operator=(const BackendPlan&) = default;
  virtual ~BackendPlan() = default;
};

/// K and V bytes of one token and KV head, scales and biases of the MLX formats among them.
std::int64_t token_kv_bytes(const Problem& problem);
/// K and V bytes at max_kv_len, each counted once; INT64_MAX when they are more.
std::int64_t max_kv_bytes(const Problem& problem);

struct PlanData {
  Problem problem;  // head_dim_v and scale resolved
  Device device;
  Policy policy;                  // every field decided
  bool earlier_kv_ready = false;  // of the options
  std::string policy_origin;      // which fields came from where, for explain(); empty: no policy file was in use
  const BackendTable* backend = nullptr;
  std::string kernel_id;
  std::int64_t rows_per_stream = 0;
  std::int64_t row_blocks = 0;  // workers' row ranges per KV stream = the read factor
  std::int64_t max_chunks = 0;
  // CPU, of a stream's only row where rows are packed:
  bool reads_parts = false;         // a step's quarters side by side
  std::int64_t steps_per_turn = 1;  // whose keys are scored before their values are added up
  WorkspaceLayout workspace;
  std::shared_ptr<const BackendPlan> backend_plan;  // null on the CPU
  std::vector<std::string> rejected;                // "kernel: reason", for explain()
  std::string prediction;  // time by a model, for explain() of a device that nobody here has measured; empty elsewhere
};

}  // namespace kvonce::core
