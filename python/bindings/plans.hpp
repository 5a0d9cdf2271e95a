// A plan as Python holds it: with workspaces of its own, so that several threads may use it at once.
#pragma once

#include <cstddef>
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

/// "f16", "float16" and so on. Throws Error{InvalidArgument} naming `argument`.
DType parse_dtype(std::string_view name, const char* argument);
/// The names of parse_dtype and those of KvFormat.
KvFormat parse_format(std::string_view name, const char* argument);

class BoundPlan;

std::shared_ptr<BoundPlan> make_bound_plan(const Problem& problem, const Choices& choices);

/// The plan of a call without one, from a PlanCache of this process.
std::shared_ptr<BoundPlan> find_plan(const Problem& problem, const Choices& choices);

class BoundPlan {
 public:
  explicit BoundPlan(Plan plan) : plan_(std::move(plan)) {}

  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }

  /// The optional arguments are none() where the caller gave none. Returns out, or (out, lse). The GIL is released
  /// while the library runs.
  nb::object attend(nb::handle q, nb::handle k, nb::handle v, nb::handle kv_lens, nb::handle kv_starts,
                    nb::handle sinks, nb::handle out, bool return_lse);

  /// As above, on what has been imported already; `like` is the object that q came from.
  nb::object run(nb::handle like, const Array& q, const Array& k, const Array& v, nb::handle kv_lens,
                 nb::handle kv_starts, nb::handle sinks, nb::handle out, bool return_lse);

 private:
  using Workspace = std::unique_ptr<std::byte[]>;
  [[nodiscard]] Workspace take_workspace();
  void put_workspace(Workspace workspace);

  Plan plan_;
  std::mutex mutex_;
  std::vector<Workspace> idle_;  // as many as there were calls at once
};

}  // namespace kvonce::python
