// PlanCache: finds the plans of earlier calls again, for callers that meet their problem anew at each call.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

#include "kvonce/plan.hpp"

namespace kvonce {

/// A plan that a PlanCache keeps, and what the cache's user keeps with it.
struct CachedPlan {
  explicit CachedPlan(Plan made) : plan(std::move(made)) {}

  const Plan plan;
  std::shared_ptr<void> attachment;  // the user's own, such as prepared workspaces; null at first; guarded by the user
};

/// The plans of the latest calls that differ. Several threads may use one cache at once.
class KVONCE_API PlanCache {
 public:
  /// Throws Error{InvalidArgument} unless max_plans is at least 1.
  explicit PlanCache(std::size_t max_plans = 64);

  /// make_plan(problem, device, options) with problem.max_kv_len rounded up, or what an earlier call of equal arguments
  /// got. Rounding is to a power of two: a growing cache meets one plan per doubling, and lengths up to 2^30 split evenly.
  /// Rules are equal when they are the same object (options.policy_file). Beyond max_plans the plan that was found
  /// longest ago is dropped; who holds it keeps it. Errors as make_plan(); nothing is kept then.
  [[nodiscard]] std::shared_ptr<CachedPlan> find(Problem problem, const Device& device,
                                                 const PlanOptions& options = {});

  [[nodiscard]] std::size_t size() const;  // plans that are kept

 private:
  struct Entry {
    Problem problem;  // as asked, rounded
    Device device;
    PlanOptions options;
    std::shared_ptr<CachedPlan> found;
  };

  const std::size_t max_plans_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // the latest first
};

}  // namespace kvonce
