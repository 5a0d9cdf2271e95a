// The end of a pool, and of a process, while threads use it.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "attend_fixture.hpp"
#include "pool_jobs.hpp"

namespace kvonce::cpu {
namespace {

TEST(PoolShutdownTest, APoolMayGoAsSoonAsItsRunReturns) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    Pool pool;
    run_job(pool, 40, 4);
  }
}

TEST(PoolShutdownTest, StopDuringRunsLosesNoWork) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Pool pool;
    std::atomic<int> jobs_done{0};
    std::thread runner([&] {
      for (int job = 0; job < 60; ++job) {
        run_job(pool, 40, 4);
        jobs_done.fetch_add(1);
      }
    });
    while (jobs_done.load() < 20) std::this_thread::yield();
    pool.stop();
    runner.join();
    EXPECT_EQ(jobs_done.load(), 60);
    EXPECT_EQ(pool.num_threads(), 0);
  }
}

TEST(PoolShutdownTest, StopBesideReserveLeavesNoThread) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Pool pool;
    std::thread grower([&] {
      for (int workers = 2; workers <= 6; ++workers) pool.reserve(workers);
    });
    pool.stop();
    grower.join();
    EXPECT_EQ(pool.num_threads(), 0);
  }
}

TEST(PoolShutdownTest, SeveralStopsAtOnceAreOne) {
  Pool pool;
  pool.reserve(4);
  std::thread other([&] { pool.stop(); });
  pool.stop();
  other.join();
  EXPECT_EQ(pool.num_threads(), 0);
}

PlanOptions many_workers() {
  PlanOptions options;
  options.chunk_tokens = 32;
  options.policy.worker_bytes = 1024;
  return options;
}

// Fixtures of threads that are inside attend when the process ends; reachable, so that they are no leak.
std::vector<AttendFixture*>& kept_fixtures() {
  static auto* const fixtures = new std::vector<AttendFixture*>;
  return *fixtures;
}

void attend_for_ever(AttendFixture& fixture) {
  while (true) fixture.attend_once();
}

// What the process does when it is started with this scene's name; none returns.
[[noreturn]] void play(const std::string& scene) {
  for (int i = 0; i < 3; ++i) kept_fixtures().push_back(new AttendFixture(256, 3, many_workers()));
  AttendFixture& own = *kept_fixtures()[0];
  own.attend_once();
  if (Pool::shared().num_threads() != 2) std::_Exit(3);
  if (scene == "exit") std::exit(0);  // the workers still spin
  if (scene == "quick_exit") std::quick_exit(0);
  for (std::size_t i = 1; i < kept_fixtures().size(); ++i) {
    std::thread([i] { attend_for_ever(*kept_fixtures()[i]); }).detach();
  }
  if (scene == "exit_beside_callers") {
    for (int i = 0; i < 5; ++i) own.attend_once();
    std::exit(0);
  }
  if (scene == "exit_from_another_thread") {
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      std::exit(0);
    }).detach();
    attend_for_ever(own);
  }
  std::_Exit(4);
}

// Starts this program again: a process of its own, unlike a forked child, has every sanitizer's full support.
// Its exit status, or -1 when it did not exit by itself in 60 s.
int status_of_scene(const std::string& scene) {
  std::string program = "/proc/self/exe";
  std::string flag = "--scene";
  std::string name = scene;
  char* const arguments[] = {program.data(), flag.data(), name.data(), nullptr};
  pid_t child = 0;
  if (posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) != 0) return -1;
  for (int ms = 0; ms < 60'000; ++ms) {
    int status = 0;
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (ended < 0 && errno != EINTR) return -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return -1;
}

class PoolExitTest : public testing::TestWithParam<const char*> {};

TEST_P(PoolExitTest, TheProcessEndsWithItsOwnStatus) {
  for (int repeat = 0; repeat < 5; ++repeat) ASSERT_EQ(status_of_scene(GetParam()), 0) << "repeat " << repeat;
}

INSTANTIATE_TEST_SUITE_P(Scenes, PoolExitTest,
                         testing::Values("exit", "quick_exit", "exit_beside_callers", "exit_from_another_thread"),
                         [](const auto& scene) { return std::string(scene.param); });

}  // namespace
}  // namespace kvonce::cpu

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--scene") kvonce::cpu::play(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
