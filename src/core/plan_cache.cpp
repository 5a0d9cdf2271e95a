#include "kvonce/plan_cache.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>

#include "core/refuse.hpp"

namespace kvonce {
namespace {

/// Beyond 2^30 nothing is gained; what no plan is made for is left for make_plan to refuse.
std::int64_t round_up(std::int64_t max_kv_len) {
  if (max_kv_len < 1 || max_kv_len > (1LL << 30)) return max_kv_len;
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(max_kv_len)));
}

}  // namespace

PlanCache::PlanCache(std::size_t max_plans) : max_plans_(max_plans) {
  if (max_plans == 0) core::refuse(ErrorCode::InvalidArgument, "max_plans", "0", "at least 1");
}

std::shared_ptr<CachedPlan> PlanCache::find(Problem problem, const Device& device, const PlanOptions& options) {
  problem.max_kv_len = round_up(problem.max_kv_len);
  std::list<Entry>
      dropped;  // destroyed after the lock: an attachment may call the cache, or wait for a thread that does
  const std::lock_guard lock(mutex_);
  const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& kept) {
    return kept.problem == problem && kept.options == options && kept.device == device;
  });
  if (entry != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, entry);
  } else {
    entries_.push_front({problem, device, options, std::make_shared<CachedPlan>(make_plan(problem, device, options))});
    if (entries_.size() > max_plans_) dropped.splice(dropped.end(), entries_, std::prev(entries_.end()));
  }
  return entries_.front().found;
}

std::size_t PlanCache::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace kvonce
