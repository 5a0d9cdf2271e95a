// The CPU backend's own threads. Workers spin for a short while after a job and then sleep, the caller works too, and
// no thread exists before a job asks for one.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace kvonce::cpu {

/// Runs one job at a time on the caller and on threads that are kept between jobs.
///
/// A job is opened with a number of seats. A thread that is awake takes a seat, works and leaves; when the caller's own
/// share ends it closes the job and waits only for the threads that are inside. A thread that wakes too late finds the
/// job closed and nobody has waited for it.
class Pool {
 public:
  /// Runs on several threads at once, told apart by slot; takes its pieces of work from a counter of its own, so that
  /// any number of slots finishes all of it. Must not throw.
  using Body = void (*)(void* context, int slot);

  static constexpr int kMaxWorkers = 1024;

  /// The pool of this process. It stays usable until the process ends: after static destruction has joined its threads
  /// a run works on its caller alone. A child made by fork() starts with an empty pool of its own.
  static Pool& shared() noexcept;

  constexpr Pool() noexcept = default;
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// Calls body(context, slot) on up to num_workers threads at once, each with its own slot in [0, num_workers). Slot 0
  /// is the caller and always runs; the others run if their thread arrives in time. Returns when every body that
  /// started has returned; what the bodies wrote is then visible to the caller. While another job runs, which includes
  /// a call from inside a body, the caller does all the work alone. Allocates nothing once the threads exist.
  void run(int num_workers, Body body, void* context);

  /// Creates the threads that run(num_workers, ...) would use. When the system refuses some, the pool carries on with
  /// those it has; the next reserve() asks again.
  void reserve(int num_workers) noexcept;

  /// Ends and joins the threads. Later runs work on their caller alone.
  void stop() noexcept;

  /// Threads that exist, without the callers.
  [[nodiscard]] int num_threads() const noexcept { return num_threads_.load(std::memory_order_relaxed); }

 private:
  static void* thread_main(void* pool);
  static void after_fork_in_child();
  void work();
  bool try_job(std::uint32_t& last_generation);
  void sleep_until_woken(std::uint32_t last_generation);
  void wake(int wanted);
  void keep_off_caller() noexcept;
  void lock_growth() noexcept;
  void forget_threads() noexcept;

  // The job. state_ is [generation : 32 | free seats : 16 | threads inside : 16]; body_ and context_ are written only
  // while no seat is free and nobody is inside, and read only from inside.
  alignas(64) std::atomic<std::uint64_t> state_{0};
  Body body_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> spin_{true};  // false when there are more threads than processors: spinning would delay the work
  std::atomic<bool> stop_{false};

  // Sleep. A thread counts itself in sleepers_ before it looks at state_ for the last time, and run() writes state_
  // before it looks at sleepers_: one of the two sees the other (both orders are sequentially consistent).
  alignas(64) std::atomic<std::uint32_t> wake_epoch_{0};
  std::atomic<int> sleepers_{0};

  alignas(64) std::atomic<bool> busy_{false};  // one caller at a time
  std::atomic<bool> growing_{false};           // guards threads_, owner_pid_ and increases of num_threads_
  std::atomic<int> num_threads_{0};
  std::atomic<int> asked_threads_{0};  // the most that reserve() has tried for; run() asks only for more than that
  std::atomic<pid_t> owner_pid_{0};    // the process in which threads_ were created
  pthread_t threads_[kMaxWorkers - 1] = {};

  // Where the threads run. Written by the threads themselves as they start and end; the rest by the busy caller alone.
  std::atomic<int> num_tids_{0};
  std::atomic<pid_t> tids_[kMaxWorkers - 1] = {};
  int kept_off_cpu_ = -1;  // the processor that the threads were told to leave to the caller
  int kept_off_tids_ = 0;  // how many of them were
};

}  // namespace kvonce::cpu
