#include "cpu/pool.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <thread>

#include "cpu/features.hpp"

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

namespace kvonce::cpu {
namespace {

constexpr std::uint64_t kOneInside = 1;
constexpr std::uint64_t kOneSeat = std::uint64_t{1} << 16;
constexpr std::uint64_t kInsideMask = kOneSeat - 1;
constexpr std::uint64_t kOneGeneration = std::uint64_t{1} << 32;
constexpr std::uint64_t kGenerationMask = ~(kOneGeneration - 1);

// A decode step calls once per layer, tens of microseconds apart; a thread that waits longer than this gives its
// processor back. Waking a sleeping one costs the caller a system call.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kPausesPerClockRead = 32;
constexpr int kPausesBeforeYield = 1000;  // a caller's wait for threads that are inside

constexpr std::uint64_t num_inside(std::uint64_t state) { return state & kInsideMask; }
constexpr std::uint64_t num_seats(std::uint64_t state) { return (state >> 16) & 0xffffU; }
constexpr std::uint32_t generation(std::uint64_t state) { return static_cast<std::uint32_t>(state >> 32); }

static_assert(Pool::kMaxWorkers <= 0xffff, "seats and threads inside are 16-bit fields");

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Sleeps while word == value; may return early. Linux's futex is called directly because it wakes a number of threads
// in one call, and because libstdc++'s atomic wait brings a unique symbol that would keep a library from unloading.
void wait_while_equal(std::atomic<std::uint32_t>& word, std::uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  word.wait(value);
#endif
}

void wake_waiters(std::atomic<std::uint32_t>& word, int count) {
#if defined(__linux__)
  static_assert(sizeof word == sizeof(std::uint32_t) && std::atomic<std::uint32_t>::is_always_lock_free);
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
#else
  for (int i = 0; i < count; ++i) word.notify_one();
#endif
}

// Never destroyed, so that threads of the host that outlive static destruction can still call; its threads are joined
// at exit and when the library is unloaded.
union SharedStorage {
  constexpr SharedStorage() noexcept : pool() {}
  ~SharedStorage() {}  // NOLINT(modernize-use-equals-default): leaves the pool alone
  Pool pool;
};
constinit SharedStorage shared_storage;

struct StopAtUnload {
  ~StopAtUnload() { shared_storage.pool.stop(); }
};
const StopAtUnload stop_at_unload;

}  // namespace

Pool& Pool::shared() noexcept { return shared_storage.pool; }

void Pool::run(int num_workers, Body body, void* context) {
  // The plain load keeps callers that find the pool busy from taking the cache line away from each other.
  if (num_workers <= 1 || busy_.load(std::memory_order_relaxed) || busy_.exchange(true, std::memory_order_acquire)) {
    body(context, 0);
    return;
  }
  const int wanted = std::min(num_workers, kMaxWorkers) - 1;
  if (asked_threads_.load(std::memory_order_relaxed) < wanted) reserve(num_workers);

  body_ = body;
  context_ = context;
  const std::uint64_t closed = state_.load(std::memory_order_relaxed);
  state_.store((closed & kGenerationMask) + kOneGeneration + static_cast<std::uint64_t>(wanted) * kOneSeat);
  wake(wanted);

  body(context, 0);

  std::uint64_t state = state_.fetch_and(kGenerationMask | kInsideMask, std::memory_order_acquire);
  int pauses = spin_.load(std::memory_order_relaxed) ? kPausesBeforeYield : 0;
  while (num_inside(state) != 0) {
    if (pauses > 0) {
      --pauses;
      pause();
    } else {
      std::this_thread::yield();
    }
    state = state_.load(std::memory_order_acquire);
  }
  busy_.store(false, std::memory_order_release);
}

// The kernel likes to wake a thread where the one that wakes it runs, which is busy with its own share from then on, and
// leaves it there: after 20 ms of idling, 32q/4kv d128 2,048 tokens on two processors of a Zen 4 server took 420 to 490 us a
// call instead of 250 to 270. So before sleeping threads are woken, they are told to stay off the caller's processor.
void Pool::keep_off_caller() noexcept {
#if defined(__linux__)
  if (!spin_.load(std::memory_order_relaxed)) return;  // more threads than processors
  const int cpu = sched_getcpu();
  const int count = std::min(num_tids_.load(std::memory_order_acquire), kMaxWorkers - 1);
  if (cpu < 0 || cpu >= CPU_SETSIZE || (cpu == kept_off_cpu_ && count == kept_off_tids_)) return;
  cpu_set_t others;
  if (sched_getaffinity(0, sizeof others, &others) != 0) return;
  CPU_CLR(static_cast<std::size_t>(cpu), &others);
  if (CPU_COUNT(&others) < count)
    return;  // the caller is bound to few processors: where the threads run is not its affair
  for (int i = 0; i < count; ++i) {
    const pid_t tid = tids_[i].load(std::memory_order_relaxed);
    if (tid != 0) sched_setaffinity(tid, sizeof others, &others);
  }
  kept_off_cpu_ = cpu;
  kept_off_tids_ = count;
#endif
}

void Pool::wake(int wanted) {
  const int asleep = sleepers_.load();
  if (asleep == 0) return;
  keep_off_caller();
  wake_epoch_.fetch_add(1);
  wake_waiters(wake_epoch_, std::min(wanted, asleep));
}

bool Pool::try_job(std::uint32_t& last_generation) {
  std::uint64_t state = state_.load();
  while (num_seats(state) != 0 && generation(state) != last_generation) {
    if (!state_.compare_exchange_weak(state, state - kOneSeat + kOneInside)) continue;
    last_generation = generation(state);
    body_(context_, static_cast<int>(num_seats(state)));
    state_.fetch_sub(kOneInside, std::memory_order_release);
    return true;
  }
  return false;
}

void Pool::sleep_until_woken(std::uint32_t last_generation) {
  sleepers_.fetch_add(1);
  const std::uint32_t epoch = wake_epoch_.load();
  const std::uint64_t state = state_.load();
  const bool has_job = num_seats(state) != 0 && generation(state) != last_generation;
  if (!has_job && !stop_.load()) wait_while_equal(wake_epoch_, epoch);
  sleepers_.fetch_sub(1);
}

void Pool::work() {
  using Clock = std::chrono::steady_clock;
  std::uint32_t last_generation = 0;
  auto deadline = Clock::now() + kSpinTime;
  while (!stop_.load()) {
    bool worked = false;
    for (int i = 0; i < kPausesPerClockRead && !worked; ++i) {
      worked = try_job(last_generation);
      pause();
    }
    const auto now = Clock::now();
    if (!worked && (now >= deadline || !spin_.load(std::memory_order_relaxed))) {
      sleep_until_woken(last_generation);
      deadline = Clock::now() + kSpinTime;
    } else if (worked) {
      deadline = now + kSpinTime;
    }
  }
}

void* Pool::thread_main(void* pool) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "kvonce");
  Pool& self = *static_cast<Pool*>(pool);
  const int slot = self.num_tids_.fetch_add(1, std::memory_order_acq_rel);
  std::atomic<pid_t>* const tid = slot < kMaxWorkers - 1 ? &self.tids_[slot] : nullptr;
  if (tid != nullptr) tid->store(static_cast<pid_t>(syscall(SYS_gettid)), std::memory_order_relaxed);
  self.work();
  if (tid != nullptr) tid->store(0, std::memory_order_relaxed);
#else
  static_cast<Pool*>(pool)->work();
#endif
  return nullptr;
}

void Pool::lock_growth() noexcept {
  while (growing_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
}

void Pool::reserve(int num_workers) noexcept {
  const int wanted = std::min(num_workers, kMaxWorkers) - 1;
  if (num_threads() >= wanted) return;
  lock_growth();
  if (!stop_.load()) {
    // Two pools may both register it: the handler does the same twice. Without it a child would merely work alone.
    static std::atomic<bool> has_fork_handler{false};
    if (!has_fork_handler.load()) has_fork_handler.store(pthread_atfork(nullptr, nullptr, &after_fork_in_child) == 0);
    asked_threads_.store(std::max(wanted, asked_threads_.load(std::memory_order_relaxed)), std::memory_order_relaxed);
    owner_pid_.store(getpid(), std::memory_order_relaxed);
    spin_.store(wanted < usable_cpus(), std::memory_order_relaxed);
    // The host's signals are for the host's threads.
    sigset_t all;
    sigset_t previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    for (int i = num_threads(); i < wanted; ++i) {
      if (pthread_create(&threads_[i], nullptr, &Pool::thread_main, this) != 0) break;
      num_threads_.store(i + 1, std::memory_order_relaxed);
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }
  growing_.store(false, std::memory_order_release);
}

void Pool::stop() noexcept {
  if (num_threads() != 0 && owner_pid_.load(std::memory_order_relaxed) != getpid()) forget_threads();
  lock_growth();
  stop_.store(true);
  wake_epoch_.fetch_add(1);
  wake_waiters(wake_epoch_, kMaxWorkers);
  const int count = num_threads_.exchange(0, std::memory_order_relaxed);
  for (int i = 0; i < count; ++i) pthread_join(threads_[i], nullptr);
  growing_.store(false, std::memory_order_release);
}

// fork() copies only the thread that called it: whatever the others were doing with the pool is never finished.
void Pool::forget_threads() noexcept {
  state_.store(0);
  sleepers_.store(0);
  num_threads_.store(0);
  num_tids_.store(0);
  for (std::atomic<pid_t>& tid : tids_) tid.store(0);
  kept_off_cpu_ = -1;
  asked_threads_.store(0);
  growing_.store(false);
  busy_.store(false);
}

void Pool::after_fork_in_child() { shared().forget_threads(); }

}  // namespace kvonce::cpu
