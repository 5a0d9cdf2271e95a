#include "kvonce/plan_cache.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>

#include "core/refuse.hpp"

namespace kvonce {
namespace {

/// Values that no plan is made for stay as they are: make_plan refuses them.
std::int64_t round_up(std::int64_t max_kv_len) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (max_kv_len < 1 || max_kv_len > kMost) return max_kv_len;
  const auto eighth = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(max_kv_len)) / 8);
  const std::int64_t unit = std::max<std::int64_t>(eighth, 1);
  return std::min((max_kv_len + unit - 1) / unit * unit, kMost);
}

}  // namespace

PlanCache::PlanCache(std::size_t max_plans) : max_plans_(max_plans) {
  if (max_plans == 0) core::refuse(ErrorCode::InvalidArgument, "max_plans", "0", "at least 1");
}

std::shared_ptr<CachedPlan> PlanCache::find(Problem problem, const Device& device, const PlanOptions& options) {
  problem.max_kv_len = round_up(problem.max_kv_len);
  const std::lock_guard lock(mutex_);
  const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& kept) {
    return kept.problem == problem && kept.options == options && kept.device == device;
  });
  if (entry != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, entry);
  } else {
    entries_.push_front({problem, device, options, std::make_shared<CachedPlan>(make_plan(problem, device, options))});
    if (entries_.size() > max_plans_) entries_.pop_back();
  }
  return entries_.front().found;
}

std::size_t PlanCache::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace kvonce
