// The threads that every baseline runs on: the library's own pool, so that arms pay the same for a dispatch and no
// second team spins beside it.
#pragma once

#include <atomic>
#include <cstdint>

#include "cpu/pool.hpp"

namespace kvonce::bench {

struct Team {
  int num_threads = 1;

  /// Calls task(i) for every i in [0, count), handing indices to whichever thread is free.
  template <class Task>
  void run(std::int64_t count, const Task& task) const {
    struct Job {
      const Task* task;
      std::int64_t count;
      std::atomic<std::int64_t> next{0};
    };
    Job job{&task, count};
    const auto body = [](void* context, int) {
      auto* const shared = static_cast<Job*>(context);
      for (;;) {
        const std::int64_t i = shared->next.fetch_add(1, std::memory_order_relaxed);
        if (i >= shared->count) return;
        (*shared->task)(i);
      }
    };
    cpu::Pool::shared().run(num_threads, body, &job);
  }
};

}  // namespace kvonce::bench
