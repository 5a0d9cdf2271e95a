// Rates of the cores: multiply-adds from registers, exponentials from L1, and the clock they ran at.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "baselines/baselines.hpp"

namespace kvonce::bench {
namespace {

constexpr double kSliceSeconds = 0.003;  // long against a scheduler tick's cost, short against frequency drift
constexpr int kNumSlices = 9;
constexpr std::int64_t kExpArray = 1024;  // two arrays of it stay in L1
std::atomic<float> sink;                  // keeps results alive

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class Work>
double seconds(const Work& work) {
  const double begin = now_s();
  work();
  return now_s() - begin;
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

// One addition per cycle on every processor: each waits for the one before.
void add_chain(std::int64_t iterations) {
  std::uint64_t x = 0;
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      x += 3;
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

// The fastest slice of work, and the fastest ratio to a clock slice run directly before or after it: what disturbs a
// slice only ever makes it slower, and a neighbour's time stolen from the clock slice would flatter the ratio, so the
// ratio is taken with the fastest clock seen.
template <class Work>
ThreadRate measure_thread(const Work& work, double ops_per_iteration) {
  const std::int64_t n = calibrate(work);
  const std::int64_t clock_n = calibrate(add_chain);
  ThreadRate rate;
  for (int slice = 0; slice < kNumSlices; ++slice) {
    const double work_s = seconds([&] { work(n); });
    const double clock_s = seconds([&] { add_chain(clock_n); });
    rate.per_s = std::max(rate.per_s, ops_per_iteration * static_cast<double>(n) / work_s);
    rate.clock_ghz = std::max(rate.clock_ghz, 16.0 * static_cast<double>(clock_n) / clock_s * 1e-9);
  }
  rate.per_cycle = rate.per_s / (rate.clock_ghz * 1e9);
  return rate;
}

// All threads at once: the sum of what each reached in the slice that went best. Threads that never got a seat in the
// pool leave their share to the others, so the number of tasks, not of threads, is what counts.
template <class Work>
double measure_team(const Work& work, double ops_per_iteration, Team team) {
  if (team.num_threads == 1) return 0.0;
  const std::int64_t n = calibrate(work);
  double best = 0.0;
  for (int slice = 0; slice < kNumSlices; ++slice) {
    const double spent = seconds([&] { team.run(2 * team.num_threads, [&](std::int64_t) { work(n); }); });
    best = std::max(best, ops_per_iteration * static_cast<double>(n) * 2.0 * team.num_threads / spent);
  }
  return best;
}

void measure_madds(const MaddLoop& loop, Team team, double& per_s_thread, double& per_s, ThreadRate& thread) {
  const auto work = [&](std::int64_t n) { sink = loop.run(n); };
  const auto ops = static_cast<double>(loop.madds_per_iteration);
  thread = measure_thread(work, ops);
  per_s_thread = thread.per_s;
  per_s = std::max(per_s_thread, measure_team(work, ops, team));
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
  rates.exp_per_s = std::max(rates.exp_per_s_thread, measure_team(exponentials, static_cast<double>(kExpArray), team));
  return rates;
}

}  // namespace kvonce::bench
