#include "plans.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <list>
#include <mutex>
#include <utility>

namespace kvonce::ggml {
namespace {

/// Every field that read_problem() sets, and the number of threads.
using Key = std::array<std::int64_t, 15>;

Key key_of(const Problem& p, int num_threads) {
  const auto bits = [](float value) { return static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(value)); };
  return {p.num_seqs,
          p.q_len,
          p.num_q_heads,
          p.num_kv_heads,
          p.head_dim_qk,
          p.head_dim_v,
          p.max_kv_len,
          static_cast<std::int64_t>(p.k_format),
          static_cast<std::int64_t>(p.v_format),
          bits(p.scale.value_or(0.0F)),
          bits(p.softcap),
          static_cast<std::int64_t>(p.mask),
          p.has_mask_slopes ? 1 : 0,
          p.has_sinks ? 1 : 0,
          num_threads};
}

Answer make_answer(const Problem& problem, int num_threads) {
  try {
    Device device = default_device();
    if (num_threads > 0) device = cpu_device(device.target, num_threads);
    return {std::make_shared<const Plan>(make_plan(problem, device)), {}};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

}  // namespace

std::shared_ptr<const Answer> find_plan(const Problem& problem, int num_threads) {
  constexpr std::size_t kMaxAnswers = 64;
  constexpr std::uint64_t kSmallest = 512;
  static std::mutex mutex;
  static std::list<std::pair<Key, std::shared_ptr<const Answer>>> answers;  // the latest first

  Problem rounded = problem;
  rounded.max_kv_len = static_cast<std::int64_t>(
      std::bit_ceil(std::max(kSmallest, static_cast<std::uint64_t>(std::max<std::int64_t>(problem.max_kv_len, 0)))));
  const Key key = key_of(rounded, num_threads);
  const std::lock_guard lock(mutex);
  const auto found =
      std::find_if(answers.begin(), answers.end(), [&](const auto& entry) { return entry.first == key; });
  if (found != answers.end()) {
    answers.splice(answers.begin(), answers, found);
  } else {
    answers.emplace_front(key, std::make_shared<const Answer>(make_answer(rounded, num_threads)));
    if (answers.size() > kMaxAnswers) answers.pop_back();
  }
  return answers.front().second;
}

}  // namespace kvonce::ggml
