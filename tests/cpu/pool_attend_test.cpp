// attend from several threads at once, on the pool and on teams of the host. Small enough for ThreadSanitizer, which is
// what these tests are for: a worker that touches a call's memory after attend has returned races with its release.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "attend_fixture.hpp"
#include "cpu/pool.hpp"

namespace kvonce {
namespace {

constexpr std::int64_t kKvLen = 256;

// Several chunks, and a worker for each however few bytes there are.
PlanOptions many_workers() {
  PlanOptions options;
  options.chunk_tokens = 32;
  options.policy.worker_bytes = 1024;
  return options;
}

// A host's team of `size` threads, started for one call and gone before it returns.
struct HostTeam {
  int size;
  std::atomic<std::int64_t> bodies{0};

  static void parallel_for(void* host, std::int64_t count, void (*body)(void*, std::int64_t), void* body_context) {
    auto& team = *static_cast<HostTeam*>(host);
    std::atomic<std::int64_t> next{0};
    std::vector<std::thread> threads;
    threads.reserve(static_cast<std::size_t>(team.size));
    for (int t = 0; t < team.size; ++t) {
      threads.emplace_back([&] {
        for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
          team.bodies.fetch_add(1);
          body(body_context, i);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

// Starts the bodies together and waits for all.
template <typename Body>
void on_threads(int count, const Body& body) {
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      ready.fetch_add(1);
      while (ready.load() < count) std::this_thread::yield();
      body(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(PoolAttendTest, SeveralCallersOfOnePlanGetTheSameBits) {
  AttendFixture fixture(kKvLen, 3, many_workers());
  const std::vector<float> expected = fixture.attend_once();
  EXPECT_EQ(cpu::Pool::shared().num_threads(), 2) << "the calls below must meet in the pool";
  std::atomic<int> num_wrong{0};
  on_threads(4, [&](int) {
    std::vector<char> workspace(fixture.workspace_bytes());
    for (int repeat = 0; repeat < 50; ++repeat) {
      if (fixture.attend_in(workspace) != expected) num_wrong.fetch_add(1);
    }
  });
  EXPECT_EQ(num_wrong.load(), 0);
}

TEST(PoolAttendTest, HostTeamsBesideThePoolGetTheSameBits) {
  AttendFixture fixture(kKvLen, 4, many_workers());
  const std::vector<float> expected = fixture.attend_once();
  std::atomic<int> num_wrong{0};
  std::atomic<std::int64_t> num_bodies{0};
  on_threads(4, [&](int caller) {
    std::vector<char> workspace(fixture.workspace_bytes());
    for (int repeat = 0; repeat < 15; ++repeat) {
      HostTeam team{caller + 1};  // fewer threads than bodies, and as many
      Context context;
      if (caller != 0) {
        context.parallel_for = HostTeam::parallel_for;
        context.parallel_for_host = &team;
      }
      if (fixture.attend_in(workspace, context) != expected) num_wrong.fetch_add(1);
      num_bodies.fetch_add(team.bodies.load());
    }
  });
  EXPECT_EQ(num_wrong.load(), 0);
  EXPECT_EQ(num_bodies.load(), 3 * 15 * 4) << "each body once";
}

TEST(PoolAttendTest, CallsFromInsideAHostsTeamGetTheSameBits) {
  AttendFixture fixture(kKvLen, 3, many_workers());
  struct Layer {
    const AttendFixture& fixture;
    const std::vector<float> expected;
    std::atomic<int> num_wrong{0};
  } layer{fixture, fixture.attend_once()};
  HostTeam team{3};
  HostTeam::parallel_for(
      &team, 30,
      [](void* context, std::int64_t) {
        auto& self = *static_cast<Layer*>(context);
        std::vector<char> workspace(self.fixture.workspace_bytes());
        if (self.fixture.attend_in(workspace) != self.expected) self.num_wrong.fetch_add(1);
      },
      &layer);
  EXPECT_EQ(layer.num_wrong.load(), 0);
}

TEST(PoolAttendTest, EverythingOfACallMayGoAsSoonAsItReturns) {
  AttendFixture kept(kKvLen, 4, many_workers());
  const std::vector<float> expected = kept.attend_once();
  std::atomic<int> num_wrong{0};
  on_threads(2, [&](int) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      // The plan, the tensors, the workspace, and the stack of the thread that called.
      auto fixture = std::make_unique<AttendFixture>(kKvLen, 4, many_workers());
      std::vector<float> out;
      std::thread([&] { out = fixture->attend_once(); }).join();
      fixture.reset();
      if (out != expected) num_wrong.fetch_add(1);
    }
  });
  EXPECT_EQ(num_wrong.load(), 0);
}

}  // namespace
}  // namespace kvonce
