// Device, Policy and Plan: make_plan is the only place that decides what will run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvonce/problem.hpp"

namespace kvonce {

namespace core {
struct PlanData;
}

/// One way to run attention on this machine: a backend and, on the CPU, an instruction-set target.
struct Device {
  Backend backend = Backend::cpu;
  /// CPU: "portable", "avx2", "avx512", "avx512_bf16", "neon", "neon_bf16"; CUDA: "sm_90", ...; Metal: "apple7" (M1) and on.
  std::string target;
  int ordinal = 0;            // CUDA: the device's number
  int num_sms = 0;            // CUDA: streaming multiprocessors; Metal: GPU cores; 0 when unknown
  std::string name;           // the processor's own name
  std::string unavailable;    // empty when usable, else one sentence saying why not
  int num_threads = 1;        // threads a plan may use; results do not depend on it
  std::int64_t l1_bytes = 0;  // data caches; 0 when unknown
  std::int64_t l2_bytes = 0;
  std::int64_t l3_bytes = 0;
  bool fetches_line_pairs = false;  // a miss brings the neighbour of its cache line too
  bool fast_pair_dot = false;  // the processor multiplies bf16 pairs faster than it converts and multiplies float32
  double read_gbps = 0.0;      // measured streaming read bandwidth for explain()'s prediction; 0 when unknown
  bool follows_prefetches = false;     // prefetches in address order start the streams that loads in that order do
  std::int64_t threadgroup_bytes = 0;  // Metal: maxThreadgroupMemoryLength; 0: 32 KB, what every Apple GPU has
  std::int64_t max_threadgroup_threads = 0;  // Metal: the pipelines' maxTotalThreadsPerThreadgroup; 0: unknown

  [[nodiscard]] bool operator==(const Device&) const = default;
};

/// Every backend and target this library knows, best CPU target first; what cannot run here says why.
KVONCE_API std::vector<Device> devices();

/// The device used when none is named: the best CPU target, or the one KVONCE_CPU_TARGET names, with
/// KVONCE_NUM_THREADS threads (default: the CPUs this process may run on).
/// Throws Error{Unavailable} when the named target cannot run here, Error{InvalidArgument} for an unknown name or count.
KVONCE_API Device default_device();

/// The CPU device for one target. Errors as default_device().
KVONCE_API Device cpu_device(std::string_view target, int num_threads = 0);

/// A CUDA device of this machine by number. Throws Error{Unavailable} when the build or the machine has no such device.
KVONCE_API Device cuda_device(int ordinal = 0);

/// An Apple GPU as its owner describes it, to plan for: nothing of this machine is asked. target: "apple7" (M1, A14) to
/// "apple10" (M5), the GPU family of Metal's feature tables; num_cores: 0 when unknown. Plans made for it explain
/// themselves; attend() answers Unavailable, since MLX launches the kernels (python/kvonce/mlx.py).
/// Throws Error{InvalidArgument} for another name or number.
KVONCE_API Device metal_device(std::string_view target, int num_cores = 0);

/// The tunables, chosen by a pure function of problem and device; 0 means "choose".
struct Policy {
  std::int64_t row_tile = 0;         // rows kept in registers, 1..8 on the CPU
  std::int64_t rows_per_worker = 0;  // rows that share one pass over a token chunk
  std::int64_t chunk_tokens = 0;     // tokens per chunk: fixes the split, whatever the number of threads
  std::int64_t step_tokens = 0;      // tokens between two softmax updates
  /// How far ahead of use K is prefetched, V a step less; -1: choose, 0: neither.
  std::int64_t prefetch_tokens = -1;
  /// One prefetch per so many cache lines: 1, or 2 where the processor adds the neighbour. Rows with gaps between them take 1.
  std::int64_t prefetch_lines = 0;
  /// bf16 q and K: 1 multiplies stored pairs, 0 converts to float32, 2 multiplies pairs of bf16 V's tokens too, whose weights it
  /// rounds to bf16; -1: choose, 2 only where the output is bf16.
  std::int64_t pair_dot = -1;
  std::int64_t worker_bytes = 0;  // K and V bytes that a call's rows see, per worker: smaller calls wake fewer threads
  /// Where and in which order prefetches go: 1 into L1, four pages side by side; 2 into L2, in address order; 0: choose.
  std::int64_t prefetch_level = 0;
  /// CPU: KV heads that a worker takes step by step together where a token's heads lie side by side, 1..8.
  std::int64_t heads_per_step = 0;
  std::int64_t splits = 0;       // CUDA, Metal: blocks or threadgroups that share one KV stream
  std::int64_t cluster = -1;     // CUDA: 1 joins a stream's blocks as one cluster, 0 through the workspace; -1: choose
  std::int64_t join_blocks = 0;  // CUDA: blocks that join a stream's partials where there is no cluster; at most 32
  std::int64_t body = 0;         // Metal: 1 vector, 2 matrix, 3 per_head (the baseline); 0: choose 1 or 2
  std::int64_t simdgroups = 0;   // Metal: simdgroups of a threadgroup

  [[nodiscard]] bool operator==(const Policy&) const = default;
};

/// "row_tile=4,chunk_tokens=2048" to a Policy. Throws Error{InvalidArgument} naming the key or value.
KVONCE_API Policy parse_policy(std::string_view text);
KVONCE_API std::string to_string(const Policy& policy);

struct PolicyFile;  // policy_file.hpp

struct PlanOptions {
  std::int64_t chunk_tokens =
      0;               // same as policy.chunk_tokens; a row's bits then do not depend on the batch or max_kv_len
  Policy policy = {};  // overrides, field by field
  /// Rules for the fields that `policy` leaves open. Null: those of the file that KVONCE_POLICY names, which is read once,
  /// by the first make_plan that needs it. A PolicyFile without rules: none, whatever KVONCE_POLICY says.
  std::shared_ptr<const PolicyFile> policy_file = nullptr;
  /// CUDA: K/V of tokens before kv_len - q_len, kv_lens and kv_starts were complete before the preceding kernel started.
  /// attend() may then start under that kernel's tail, see cuda.cuh.
  bool earlier_kv_ready = false;

  [[nodiscard]] bool operator==(const PlanOptions&) const = default;
};

/// What will run. Immutable; copies share one object; may be used by several threads at once with different workspaces.
class KVONCE_API Plan {
 public:
  explicit Plan(std::shared_ptr<const core::PlanData> data) noexcept : data_(std::move(data)) {}

  [[nodiscard]] const Problem& problem() const noexcept;
  [[nodiscard]] const Device& device() const noexcept;
  [[nodiscard]] const Policy& policy() const noexcept;        // every field decided
  [[nodiscard]] std::string_view kernel_id() const noexcept;  // attend_<target>_<kv format>_d<qk>x<v>_r<row_tile>
  /// Times each KV byte is fetched from beyond a worker's private cache: ceil(rows_per_stream / rows_per_worker).
  [[nodiscard]] std::int64_t read_factor() const noexcept;
  [[nodiscard]] std::int64_t max_chunks() const noexcept;      // token chunks of the longest sequence
  [[nodiscard]] std::size_t workspace_bytes() const noexcept;  // what attend needs, at any alignment
  [[nodiscard]] std::int64_t max_kv_bytes() const noexcept;    // K and V bytes at max_kv_len, each counted once
  /// Several lines: kernel, read factor, chunks, workspace, predicted bytes and time, why other kernels were rejected.
  [[nodiscard]] std::string explain() const;
  [[nodiscard]] const core::PlanData& data() const noexcept { return *data_; }

 private:
  std::shared_ptr<const core::PlanData> data_;
};

/// Validates every rule and decides. Touches no device and no tensor; pure but for the policy file of KVONCE_POLICY. A
/// tunable is the caller's (options.policy), else that of the first matching rule of the policy file, else built in.
/// Throws Error: InvalidArgument (naming the field, what was given, what is allowed), Unsupported (what, and what to use
/// instead) or Unavailable.
KVONCE_API Plan make_plan(const Problem& problem, const Device& device, const PlanOptions& options = {});
KVONCE_API Plan make_plan(const Problem& problem);  // on default_device()

}  // namespace kvonce
