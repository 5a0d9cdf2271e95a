// attend and threads: which calls create any, and what a forked child gets. Each test forks, because a process has one
// shared pool whose threads stay.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "attend_fixture.hpp"
#include "cpu/pool.hpp"
#include "forked_child.hpp"
#include "kvonce/kvonce.hpp"

namespace kvonce {
namespace {

int pool_threads() { return cpu::Pool::shared().num_threads(); }

TEST(ThreadsTest, AForkedChildGivesTheSameBitsWithAPoolOfItsOwnAndTheParentGoesOn) {
  AttendFixture fixture(4096, 3);
  const std::vector<float> expected = fixture.attend_once();
  EXPECT_EQ(pool_threads(), 2);
  const auto child = [&] {
    if (pool_threads() != 0) return 2;
    if (fixture.attend_once() != expected) return 3;
    if (pool_threads() != 2) return 4;
    return fixture.attend_once() == expected ? 0 : 5;
  };
  for (int repeat = 0; repeat < 5; ++repeat) {
    EXPECT_EQ(status_of_child(child), 0);
    EXPECT_EQ(fixture.attend_once(), expected);
  }
}

TEST(ThreadsTest, ForkingWhileAnotherThreadAttendsGivesTheSameBits) {
  AttendFixture fixture(4096, 2);
  AttendFixture busy_fixture(4096, 2);
  const std::vector<float> expected = fixture.attend_once();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) busy_fixture.attend_once();
  });
  for (int repeat = 0; repeat < 20; ++repeat) {
    EXPECT_EQ(status_of_child([&] { return fixture.attend_once() == expected && pool_threads() == 1 ? 0 : 2; }), 0);
  }
  stop.store(true);
  busy.join();
}

TEST(ThreadsTest, AHostsTeamLeavesThePoolWithoutThreads) {
  AttendFixture fixture(4096, 4);
  const std::vector<float> expected = fixture.attend_once();
  const auto child = [&] {
    Context context;
    context.parallel_for = [](void* host, std::int64_t count, void (*body)(void*, std::int64_t), void* body_context) {
      *static_cast<std::int64_t*>(host) = count;
      for (std::int64_t i = count - 1; i >= 0; --i) body(body_context, i);
    };
    std::int64_t count = 0;
    context.parallel_for_host = &count;
    if (fixture.attend_once(context) != expected) return 2;
    if (count != 4) return 3;
    return pool_threads() == 0 ? 0 : 4;
  };
  EXPECT_EQ(status_of_child(child), 0);
}

TEST(ThreadsTest, OneThreadAndShortCachesCreateNoThread) {
  AttendFixture large(4096, 4);
  AttendFixture small(16, 4);
  const auto child = [&] {
    Context one;
    one.num_threads = 1;
    large.attend_once(one);
    if (pool_threads() != 0) return 2;
    small.attend_once();
    if (pool_threads() != 0) return 3;
    large.attend_once();
    return pool_threads() == 3 ? 0 : 4;
  };
  EXPECT_EQ(status_of_child(child), 0);
}

TEST(ThreadsTest, WorkerBytesSayHowManyWorkersACallTakes) {
  constexpr std::int64_t kTokenBytes = 4 * (64 + 64) * 4;
  constexpr std::int64_t kKvBytes = 4096 * kTokenBytes;
  const auto num_workers = [](std::int64_t worker_bytes, std::int64_t window = 0) {
    PlanOptions options;
    options.policy.worker_bytes = worker_bytes;
    AttendFixture fixture(4096, 4, options, window);
    Context context;
    context.parallel_for = [](void* host, std::int64_t count, void (*body)(void*, std::int64_t), void* body_context) {
      *static_cast<std::int64_t*>(host) = count;
      for (std::int64_t i = 0; i < count; ++i) body(body_context, i);
    };
    std::int64_t count = 1;  // one worker: the host is not asked
    context.parallel_for_host = &count;
    fixture.attend_once(context);
    return count;
  };
  EXPECT_EQ(num_workers(1), 4) << "the threads there are";
  EXPECT_EQ(num_workers(kKvBytes / 2), 3);
  EXPECT_EQ(num_workers(kKvBytes), 2);
  EXPECT_EQ(num_workers(kKvBytes + 1), 1);
  EXPECT_EQ(num_workers(600 * kTokenBytes, 600), 2) << "a window leaves its own keys";
  EXPECT_EQ(num_workers(600 * kTokenBytes + 1, 600), 1);
}

TEST(ThreadsTest, PlanningCreatesNoThread) {
  const auto child = [] {
    const AttendFixture fixture(4096, 8);
    return pool_threads() == 0 ? 0 : 2;
  };
  EXPECT_EQ(status_of_child(child), 0);
}

TEST(ThreadsTest, TheEnvironmentSetsTheNumberOfThreadsAndTheTarget) {
  const auto in_child = [](const char* name, const char* value, const std::function<int()>& body) {
    return status_of_child([&] {
      setenv(name, value, 1);
      return body();
    });
  };
  const auto refused = [](const std::string& word) {
    try {
      default_device();
      return 2;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::InvalidArgument) return 3;
      return std::string(error.what()).find(word) != std::string::npos ? 0 : 4;
    }
  };
  EXPECT_EQ(in_child("KVONCE_NUM_THREADS", "7", [] { return default_device().num_threads == 7 ? 0 : 2; }), 0);
  EXPECT_EQ(in_child("KVONCE_NUM_THREADS", "7", [] { return cpu_device("portable", 3).num_threads == 3 ? 0 : 2; }), 0)
      << "a number given in the call wins";
  for (const char* bad : {"0", "-1", "1025", "two", "2x", " 2"}) {
    EXPECT_EQ(in_child("KVONCE_NUM_THREADS", bad, [&] { return refused("KVONCE_NUM_THREADS"); }), 0) << bad;
  }
  EXPECT_EQ(in_child("KVONCE_CPU_TARGET", "portable", [] { return default_device().target == "portable" ? 0 : 2; }), 0);
  EXPECT_EQ(in_child("KVONCE_CPU_TARGET", "avx9000", [&] { return refused("avx9000"); }), 0);
}

}  // namespace
}  // namespace kvonce
