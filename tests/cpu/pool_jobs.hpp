// Jobs that show what a pool did with them, for the tests of the pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/pool.hpp"

#if !defined(__has_feature)
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define KVONCE_TEST_TSAN 1
#else
#define KVONCE_TEST_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define KVONCE_TEST_ASAN 1
#else
#define KVONCE_TEST_ASAN 0
#endif

namespace kvonce::cpu {

using Clock = std::chrono::steady_clock;

inline double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// A job of num_items pieces, each of which must be done exactly once, by slots that are never used twice at a time.
struct Job {
  Job(std::int64_t items, int workers)
      : num_items(items),
        done(static_cast<std::size_t>(items)),
        slot_calls(static_cast<std::size_t>(workers)),
        slot_threads(static_cast<std::size_t>(workers)) {}

  static void body(void* context, int slot) {
    auto& job = *static_cast<Job*>(context);
    if (slot < 0 || slot >= static_cast<int>(job.slot_calls.size())) {
      job.bad_slots.fetch_add(1);
      return;
    }
    job.slot_calls[static_cast<std::size_t>(slot)].fetch_add(1);
    job.slot_threads[static_cast<std::size_t>(slot)] = std::this_thread::get_id();
    for (std::int64_t i = job.next.fetch_add(1); i < job.num_items; i = job.next.fetch_add(1)) {
      job.done[static_cast<std::size_t>(i)] += 1;  // plain: run() must order it before the checks below
      for (int spin = 0; spin < job.work_per_item; ++spin) job.sink.fetch_add(1, std::memory_order_relaxed);
    }
  }

  void expect_complete() const {
    EXPECT_EQ(bad_slots.load(), 0);
    EXPECT_EQ(slot_calls[0].load(), 1);
    for (const auto& calls : slot_calls) EXPECT_LE(calls.load(), 1);
    EXPECT_EQ(std::count(done.begin(), done.end(), 1), num_items);
    std::vector<std::thread::id> threads(slot_threads);
    std::erase(threads, std::thread::id());
    std::sort(threads.begin(), threads.end());
    EXPECT_EQ(std::adjacent_find(threads.begin(), threads.end()), threads.end()) << "a thread worked in two slots";
  }

  [[nodiscard]] int workers_that_came() const {
    int count = 0;
    for (const auto& calls : slot_calls) count += calls.load();
    return count;
  }

  std::int64_t num_items;
  int work_per_item = 0;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> sink{0};
  std::atomic<int> bad_slots{0};
  std::vector<int> done;
  std::vector<std::atomic<int>> slot_calls;
  std::vector<std::thread::id> slot_threads;
};

inline void run_job(Pool& pool, std::int64_t num_items, int num_workers) {
  Job job(num_items, num_workers);
  pool.run(num_workers, &Job::body, &job);
  job.expect_complete();
}

// Slots wait for one another, so that the job ends only if `expected` threads are in it at once.
struct Rendezvous {
  int expected;
  std::atomic<int> arrived{0};
  std::array<std::atomic<int>, 64> slot_calls{};
  std::atomic<bool> timed_out{false};

  static void body(void* context, int slot) {
    auto& self = *static_cast<Rendezvous*>(context);
    self.slot_calls[static_cast<std::size_t>(slot)].fetch_add(1);
    self.arrived.fetch_add(1);
    const auto start = Clock::now();
    while (self.arrived.load() < self.expected && !self.timed_out.load()) {
      if (us_since(start) > 20e6) self.timed_out.store(true);
      std::this_thread::yield();
    }
  }
};

}  // namespace kvonce::cpu
