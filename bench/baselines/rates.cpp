// Rates of the cores: multiply-adds from registers, exponentials from L1, and the clock they ran at.
#include <algorithm>
#include <array>
#include <atomic>
#include <ctime>
#include <thread>
#include <vector>

#include "baselines/baselines.hpp"

namespace kvonce::bench {
namespace {

constexpr double kSliceSeconds = 0.002;  // long against a scheduler tick's cost, short against frequency drift
constexpr int kNumSlices = 15;
constexpr int kTurnsPerSlice = 20;
constexpr double kAddsPerIteration = 16.0;
constexpr std::int64_t kExpArray = 1024;  // two arrays of it stay in L1
std::atomic<float> sink;                  // keeps results alive

// Processor time of the calling thread: what other processes take from it does not count.
double now_s() {
  std::timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

template <class Work>
double seconds(const Work& work) {
  const double begin = now_s();
  work();
  return std::max(now_s() - begin, 1e-9);
}

// Iterations of work(n) that take about one slice.
template <class Work>
std::int64_t calibrate(const Work& work) {
  std::int64_t n = 1024;
  double spent = seconds([&] { work(n); });
  while (spent < kSliceSeconds / 4) {
    n *= 4;
    spent = seconds([&] { work(n); });
  }
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(n) * kSliceSeconds / spent));
}

// One addition per cycle on every processor: each waits for the one before. The addend is a register that the compiler
// knows nothing about: Golden Cove cores add small constants for free while renaming.
void add_chain(std::int64_t iterations) {
  std::uint64_t x = 0;
  std::uint64_t addend = 3;
  asm volatile("" : "+r"(addend));
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      x += addend;
      asm volatile("" : "+r"(x));
    }
  }
  sink = static_cast<float>(x & 1U);
}

struct ThreadRate {
  double per_s = 0.0;
  double per_cycle = 0.0;
  double clock_ghz = 0.0;
};

// The best slice counts: whatever disturbs one, a neighbour on the same core for instance, only makes it slower. Within
// a slice the work and the clock chain take turns of a tenth of a millisecond, so that the clock is the one that the work
// itself brings about: wide vectors lower it for about a millisecond.
template <class Work>
ThreadRate measure_thread(const Work& work, double ops_per_iteration) {
  const auto turn = [](std::int64_t n) { return std::max<std::int64_t>(1, n / kTurnsPerSlice); };
  const std::int64_t n = turn(calibrate(work));
  const std::int64_t clock_n = turn(calibrate(add_chain));
  ThreadRate best;
  for (int slice = 0; slice < kNumSlices; ++slice) {
    double work_s = 0.0;
    double clock_s = 0.0;
    for (int i = 0; i < kTurnsPerSlice; ++i) {
      work_s += seconds([&] { work(n); });
      clock_s += seconds([&] { add_chain(clock_n); });
    }
    const double per_s = ops_per_iteration * static_cast<double>(n) * kTurnsPerSlice / work_s;
    const double hertz = kAddsPerIteration * static_cast<double>(clock_n) * kTurnsPerSlice / clock_s;
    if (per_s > best.per_s) best = {per_s, per_s / hertz, hertz * 1e-9};
  }
  return best;
}

// The sum over threads that all work at the same time, in the best slice. Its own threads: the pool does not promise
// that every seat is taken. Threads beyond the processors add nothing.
template <class Work>
double measure_team(const Work& work, double ops_per_iteration, int num_threads) {
  const unsigned num_cpus = std::max(1U, std::thread::hardware_concurrency());
  const int at_once = std::min(num_threads, static_cast<int>(num_cpus));
  const std::int64_t n = calibrate(work);
  std::array<std::atomic<double>, kNumSlices> per_s{};
  std::atomic<int> started{0};
  const auto run = [&] {
    ++started;
    while (started < at_once) std::this_thread::yield();
    for (auto& slice : per_s) slice += ops_per_iteration * static_cast<double>(n) / seconds([&] { work(n); });
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < at_once; ++i) threads.emplace_back(run);
  run();
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(per_s.begin(), per_s.end());
}

void measure_madds(const MaddLoop& loop, Team team, double& per_s_thread, double& per_s, ThreadRate& thread) {
  const auto work = [&](std::int64_t n) { sink = loop.run(n); };
  const auto ops = static_cast<double>(loop.madds_per_iteration);
  thread = measure_thread(work, ops);
  per_s_thread = thread.per_s;
  per_s = team.num_threads > 1 ? measure_team(work, ops, team.num_threads) : per_s_thread;
}

}  // namespace

Rates measure_rates(const TargetKernels& kernels, Team team) {
  Rates rates;
  ThreadRate thread;
  measure_madds(kernels.madd, team, rates.madd_per_s_thread, rates.madd_per_s, thread);
  rates.clock_ghz = thread.clock_ghz;
  rates.madd_instr_per_cycle = thread.per_cycle / static_cast<double>(kernels.madd.madds_per_instruction);
  if (kernels.madd_bf16.run != nullptr) {
    measure_madds(kernels.madd_bf16, team, rates.madd_bf16_per_s_thread, rates.madd_bf16_per_s, thread);
    rates.madd_bf16_instr_per_cycle = thread.per_cycle / static_cast<double>(kernels.madd_bf16.madds_per_instruction);
  }
  const auto exponentials = [&](std::int64_t n) {
    alignas(64) float in[kExpArray];
    alignas(64) float out[kExpArray];
    for (std::int64_t i = 0; i < kExpArray; ++i) in[i] = -static_cast<float>(i) / 64.0F;
    for (std::int64_t i = 0; i < n; ++i) kernels.exp2(in, out, kExpArray);
    sink = out[kExpArray / 2];
  };
  rates.exp_per_s_thread = measure_thread(exponentials, static_cast<double>(kExpArray)).per_s;
  rates.exp_per_s = team.num_threads > 1 ? measure_team(exponentials, static_cast<double>(kExpArray), team.num_threads)
                                         : rates.exp_per_s_thread;
  return rates;
}

}  // namespace kvonce::bench
