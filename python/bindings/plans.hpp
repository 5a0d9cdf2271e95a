// A plan as Python holds it: with workspaces of its own, so that several threads may use it at once.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "kvonce/kvonce.hpp"

namespace kvonce::python {

/// What an attend has besides its tensors: how to make the plan.
struct Choices {
  std::optional<std::int64_t> chunk_tokens;
  std::optional<int> threads;         // none: KVONCE_NUM_THREADS, or the CPUs of this process
  std::optional<std::string> target;  // none: KVONCE_CPU_TARGET, or the best
  std::optional<std::string> policy;  // "row_tile=4,..." or the path of a policy file
};

/// What a call has besides q, K and V; none() where the caller gave nothing.
struct CallArguments {
  nb::handle kv_lens;
  nb::handle kv_starts;
  nb::handle sinks;
  nb::handle out;
  bool return_lse = false;
  std::optional<std::uintptr_t> stream;  // CUDA; none: torch's current stream
  nb::handle alibi_slopes = nb::none();
  nb::handle mask = nb::none();  // as import_mask() takes it
  nb::handle mask_slopes = nb::none();
  nb::handle k_scales = nb::none();  // of the MLX formats
  nb::handle k_biases = nb::none();
  nb::handle v_scales = nb::none();
  nb::handle v_biases = nb::none();
  bool tokens_first = false;  // K, V and their scales and biases come as [num_seqs, kv_len, num_kv_heads, ...]
};

/// "f16", "float16" and so on. Throws Error{InvalidArgument} naming `argument`.
DType parse_dtype(std::string_view name, const char* argument);
/// The names of parse_dtype and those of KvFormat.
KvFormat parse_format(std::string_view name, const char* argument);

/// K or V of a format as an array: shape and strides count values.
Array import_cache(nb::handle object, const char* name, KvFormat format);

/// Whether tokens come before heads: true of "BSHD", false of "BHSD". Throws Error{Unsupported} for the paged layouts "NHD"
/// and "HND", Error{InvalidArgument} naming `kv_layout` for anything else.
bool parse_layout(std::string_view name);
/// Heads before tokens, whatever they were: swaps the middle dims of an array of 4.
void put_heads_first(Array& array, bool tokens_first);

/// Sets quant_group and scales_dtype where a format is an MLX one, after the shapes of the scales.
void name_scales(const CallArguments& arguments, Problem& problem);

/// "boolean" or "additive". Throws Error{InvalidArgument} naming `mask`.
MaskKind parse_mask(std::string_view name);

/// "cpu", "cuda" or "cuda:1". Throws Error{InvalidArgument} naming `device`.
Place parse_place(std::string_view name);

class BoundPlan;

std::shared_ptr<BoundPlan> make_bound_plan(const Problem& problem, Place place, const Choices& choices);

/// The plan of a call without one, from a PlanCache of this process.
std::shared_ptr<BoundPlan> find_plan(const Problem& problem, Place place, const Choices& choices);

/// Calls attend on torch tensors of the same memory; returns arrays of q's kind.
using Attend = std::function<nb::object(nb::handle q, nb::handle k, nb::handle v, const CallArguments& arguments)>;
nb::object attend_through_torch(const Attend& attend, nb::handle q, nb::handle k, nb::handle v,
                                const CallArguments& arguments);

class BoundPlan {
 public:
  explicit BoundPlan(Plan plan) : plan_(std::move(plan)) {}

  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] Place place() const noexcept;

  /// Returns out, or (out, lse). The GIL is released while the library runs.
  nb::object attend(nb::handle q, nb::handle k, nb::handle v, const CallArguments& arguments);

  /// As above, on what has been imported already; `like` is the object that q came from, `mask` arguments.mask.
  nb::object run(nb::handle like, const Array& q, const Array& k, const Array& v, const Mask& mask,
                 const CallArguments& arguments);

 private:
  using Workspace = std::unique_ptr<std::byte[]>;
  [[nodiscard]] Workspace take_workspace();
  void put_workspace(Workspace workspace);
  void run_on_cpu(const Inputs& inputs, const Outputs& outputs);
  void run_on_cuda(const Inputs& inputs, const Outputs& outputs, std::optional<std::uintptr_t> stream);

  Plan plan_;
  std::mutex mutex_;
  std::vector<Workspace> idle_;   // CPU: as many as there were calls at once
  nb::object device_workspaces_;  // CUDA: kvonce._workspaces.Workspaces, made by the first call
};

/// The tokens of workspaces whose captures' graphs have been destroyed since the last call.
std::vector<std::uintptr_t> released_captures();

}  // namespace kvonce::python
