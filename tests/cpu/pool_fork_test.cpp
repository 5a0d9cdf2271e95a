// The pool across fork(): the child starts afresh, the parent goes on.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "forked_child.hpp"
#include "pool_jobs.hpp"

namespace kvonce::cpu {
namespace {

// In the child: 0 when a job that needs three threads at once completes, with threads of the child's own.
int rendezvous_in_child() {
  Pool& pool = Pool::shared();
  if (pool.num_threads() != 0) return 2;
  Rendezvous rendezvous{3};
  pool.run(3, &Rendezvous::body, &rendezvous);
  if (rendezvous.timed_out.load() || rendezvous.arrived.load() != 3) return 3;
  return pool.num_threads() == 2 ? 0 : 4;
}

TEST(PoolForkTest, AForkedChildStartsAPoolOfItsOwnAndTheParentGoesOn) {
  Pool& pool = Pool::shared();
  // Threads that are still starting may hold a sanitizer's locks, which a child would find held for ever.
  Rendezvous started{4};
  pool.run(4, &Rendezvous::body, &started);
  for (int repeat = 0; repeat < 5; ++repeat) {
    run_job(pool, 100, 4);
    EXPECT_EQ(status_of_child(rendezvous_in_child), 0);
    Rendezvous rendezvous{4};
    pool.run(4, &Rendezvous::body, &rendezvous);
    EXPECT_FALSE(rendezvous.timed_out.load());
  }
}

TEST(PoolForkTest, ForkWhileAnotherThreadRunsJobsIsSafe) {
  if (KVONCE_TEST_ASAN) GTEST_SKIP() << "a fork may find AddressSanitizer's own locks held; other builds run this";
  if (KVONCE_TEST_TSAN) GTEST_SKIP() << "a fork may find ThreadSanitizer's own locks held; other builds run this";
  Pool& pool = Pool::shared();
  std::atomic<bool> stop{false};
  std::thread runner([&] {
    while (!stop.load()) run_job(pool, 200, 4);
  });
  for (int repeat = 0; repeat < 30; ++repeat) EXPECT_EQ(status_of_child(rendezvous_in_child), 0);
  stop.store(true);
  runner.join();
}

TEST(PoolForkTest, AForkedChildEndsNormallyWithItsThreadsAlive) {
  if (KVONCE_TEST_ASAN)
    GTEST_SKIP() << "LeakSanitizer cannot stop the threads of a forked child at its exit; other builds run this";
  if (KVONCE_TEST_TSAN)
    GTEST_SKIP() << "ThreadSanitizer takes the thread that a child's exit joins for another; other builds run this";
  Pool& pool = Pool::shared();
  run_job(pool, 100, 4);
  const auto exit_after_work = [] {
    const int status = rendezvous_in_child();
    std::fflush(nullptr);
    std::exit(status);  // static destruction joins the child's threads
    return status;
  };
  EXPECT_EQ(status_of_child(exit_after_work), 0);
  const auto exit_without_work = []() -> int { std::exit(0); };
  EXPECT_EQ(status_of_child(exit_without_work), 0);
}

TEST(PoolForkTest, APoolOfTheParentWorksOnTheCallerInAChild) {
  Pool pool;
  run_job(pool, 100, 4);
  const auto child = [&pool] {
    Job job(100, 4);
    pool.run(4, &Job::body, &job);
    if (job.workers_that_came() != 1) return 2;
    pool.stop();
    return std::count(job.done.begin(), job.done.end(), 1) == 100 ? 0 : 3;
  };
  EXPECT_EQ(status_of_child(child), 0);
}

TEST(PoolForkTest, WorkIsDoneByFewerThreadsWhenTheSystemRefusesSome) {
  if (KVONCE_TEST_TSAN || KVONCE_TEST_ASAN)
    GTEST_SKIP() << "the sanitizer needs the address space that this test takes away";
  const auto child = [] {
    // No room for a further thread stack.
    const rlimit limit{1, 1};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 2;
    Pool& pool = Pool::shared();
    Job job(100, 200);
    pool.run(200, &Job::body, &job);
    if (pool.num_threads() >= 199) return 3;
    return std::count(job.done.begin(), job.done.end(), 1) == 100 ? 0 : 4;
  };
  EXPECT_EQ(status_of_child(child), 0);
}

}  // namespace
}  // namespace kvonce::cpu
