// Plans of earlier nodes. A model asks the same question once per layer and token.
#pragma once

#include <kvonce/kvonce.hpp>
#include <memory>
#include <string>

namespace kvonce::ggml {

/// A plan, or why there is none.
struct Answer {
  std::shared_ptr<const Plan> plan;
  std::string refusal;
};

/// The plan for a problem whose max_kv_len may be rounded up (the cache grows by a few cells at a time); num_threads 0:
/// all of the process. Any thread.
std::shared_ptr<const Answer> find_plan(const Problem& problem, int num_threads);

}  // namespace kvonce::ggml
