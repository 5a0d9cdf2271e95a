// What must not change a result: threads, repetition, the rest of the batch, capacity, the host's team, other callers.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "generator.hpp"
#include "target_test.hpp"

namespace kvonce::conformance {
namespace {

class InvarianceTest : public TargetTest {};

TEST_P(InvarianceTest, ThreadCountChangesNoBit) {
  for (const KvFormat format : kPlainFormats) {
    for (const std::int64_t chunk : {0, 1, 16, 64}) {
      CaseSpec spec = typical(3, format, 112, 7, 3);
      spec.options.chunk_tokens = chunk;
      spec.num_threads = 1;
      const auto one = result_bytes(spec);
      for (const int threads : {2, 3, 7, 64}) {
        spec.num_threads = threads;
        EXPECT_EQ(one, result_bytes(spec)) << spec.name << " threads " << threads << " chunk " << chunk;
      }
    }
  }
}

TEST_P(InvarianceTest, FewerThreadsThanPlannedChangeNoBit) {
  CaseSpec spec = typical(3, KvFormat::bf16, 64, 7, 3);
  spec.num_threads = 7;
  spec.options.chunk_tokens = 32;
  const auto all = result_bytes(spec);
  for (const int threads : {1, 2, 3}) {
    Context context;
    context.num_threads = threads;
    EXPECT_EQ(all, result_bytes(spec, context));
  }
}

// Where prefetches go, how far ahead, and the order in which one row's keys are read for them.
TEST_P(InvarianceTest, PrefetchesChangeNoBit) {
  for (const KvFormat format : kPlainFormats) {
    for (const std::int64_t group : {1, 2, 8}) {
      for (const std::int64_t dim : {64, 128, 40, 100}) {
        if (quick() && (group == 2 || dim == 128 || dim == 40)) continue;
        CaseSpec spec = typical(1, format, dim, group, 3);
        spec.options.policy.pair_dot = 0;  // else chosen by the prefetches of one row
        spec.options.policy.prefetch_level = 1;
        const auto expected = result_bytes(spec);
        expect_oracle(spec);
        for (const std::int64_t level : {1, 2}) {
          for (const std::int64_t tokens : {0, 64, 200}) {
            for (const std::int64_t lines : {1, 2}) {
              spec.options.policy.prefetch_level = level;
              spec.options.policy.prefetch_tokens = tokens;
              spec.options.policy.prefetch_lines = lines;
              EXPECT_EQ(expected, result_bytes(spec)) << spec.name << " group " << group << " level " << level
                                                      << " tokens " << tokens << " lines " << lines;
            }
          }
        }
      }
    }
  }
}

// Heads side by side in memory, a step of each in turn or one after the other; with masks that differ from head to head.
TEST_P(InvarianceTest, HeadsPerStepChangesNoBit) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8_0}) {
    for (const std::int64_t kv_heads : {2, 3, 9}) {
      for (const MaskKind mask : {MaskKind::none, MaskKind::boolean}) {
        if (quick() && kv_heads != 3) continue;
        CaseSpec spec = typical(2, format, 64, 3, kv_heads);
        if (format == KvFormat::q8_0) spec.problem.q_dtype = DType::f32;
        spec.options.policy.step_tokens = 16;
        spec.options.chunk_tokens = 56;
        if (mask != MaskKind::none) {
          spec.problem.mask = mask;
          spec.problem.causal = false;
          spec.mask_value = [](std::int64_t seq, std::int64_t head, std::int64_t row, std::int64_t key) {
            return (key / 16 + head + row + seq) % 3 != 0 ? 1.0 : 0.0;  // whole steps are skipped by some heads
          };
        }
        const auto apart = result_bytes(spec);
        expect_oracle(spec);
        spec.k.token_major = spec.v.token_major = true;
        for (const std::int64_t heads : {1, 2, 3, 8}) {
          for (const int threads : {1, 3}) {
            for (const std::int64_t level : {1, 2}) {
              spec.options.policy.heads_per_step = heads;
              spec.options.policy.prefetch_level = level;
              spec.num_threads = threads;
              EXPECT_EQ(apart, result_bytes(spec)) << spec.name << " kv_heads " << kv_heads << " heads " << heads
                                                   << " threads " << threads << " level " << level;
            }
          }
        }
      }
    }
  }
}

TEST_P(InvarianceTest, RepetitionChangesNoBit) {
  for (const std::int64_t kv_heads : {1, 2, 5}) {
    CaseSpec spec = typical(2, KvFormat::bf16, 128, 4, kv_heads);
    spec.num_threads = 3;
    spec.options.chunk_tokens = 24;
    const Plan plan = plan_case(spec, device());
    CaseTensors tensors(spec);
    ASSERT_EQ(run_case(plan, spec, tensors), "");
    const auto first = tensors.result_bytes();
    std::vector<unsigned char> workspace(plan.workspace_bytes());
    for (int repeat = 0; repeat < (quick() ? 40 : 300); ++repeat) {
      tensors.reset_outputs();
      attend(plan, tensors.inputs(), tensors.outputs(), workspace.data(), workspace.size());
      ASSERT_EQ(first, tensors.result_bytes()) << "repeat " << repeat;
    }
  }
}

// Row `seq` of a batch against a batch of that row alone, at a fixed chunk_tokens.
TEST_P(InvarianceTest, ARowAloneEqualsTheRowInABatch) {
  for (const std::int64_t kv_heads : {1, 2, 3, 4, 5, 6, 7}) {
    for (const std::int64_t q_len : {1, 3}) {
      if (quick() && (kv_heads + q_len) % 4 != 0) continue;
      const std::int64_t num_seqs = 17;
      CaseSpec batch = typical(q_len, kPlainFormats[kv_heads % 3], 64, 4, kv_heads);
      batch.problem.num_seqs = num_seqs;
      batch.kv_lens.clear();
      for (std::int64_t seq = 0; seq < num_seqs; ++seq) {
        batch.kv_lens.push_back(static_cast<std::int32_t>(seq * 53 % 201));
      }
      batch.options.chunk_tokens = 48;
      batch.num_threads = 3;
      const auto value = [](std::uint64_t seed) {
        return [seed](std::int64_t seq, std::int64_t head, std::int64_t token, std::int64_t d) {
          return normal_value(seed, static_cast<std::uint64_t>(((seq * 64 + head) * 256 + token) * 64 + d));
        };
      };
      batch.q_value = value(1);
      batch.k_value = value(2);
      batch.v_value = value(3);
      const auto together = result_bytes(batch);
      const std::size_t per_seq = together.size() / static_cast<std::size_t>(num_seqs);
      for (std::int64_t seq = 0; seq < num_seqs; ++seq) {
        CaseSpec alone = batch;
        alone.problem.num_seqs = 1;
        alone.kv_lens = {batch.kv_lens[static_cast<std::size_t>(seq)]};
        alone.problem.max_kv_len = alone.kv_lens[0] + 1;
        const auto shifted = [seq](const ValueFn& fn) {
          return [fn, seq](std::int64_t, std::int64_t head, std::int64_t token, std::int64_t d) {
            return fn(seq, head, token, d);
          };
        };
        alone.q_value = shifted(batch.q_value);
        alone.k_value = shifted(batch.k_value);
        alone.v_value = shifted(batch.v_value);
        const auto begin = together.begin() + seq * static_cast<std::int64_t>(per_seq);
        EXPECT_TRUE(std::equal(begin, begin + static_cast<std::int64_t>(per_seq), result_bytes(alone).begin()))
            << "seq " << seq << " kv_heads " << kv_heads << " q_len " << q_len;
      }
    }
  }
}

// One plan serves a cache that grows token by token; every step against the oracle.
TEST_P(InvarianceTest, OnePlanServesAGrowingCache) {
  for (const KvFormat format : kPlainFormats) {
    CaseSpec spec = typical(1, format, 64, 3, 1);
    spec.problem.num_seqs = 1;
    spec.problem.max_kv_len = 300;
    const Plan plan = plan_case(spec, device());
    for (std::int32_t kv_len = 0; kv_len <= (quick() ? 100 : 300); ++kv_len) {
      spec.kv_lens = {kv_len};
      CaseTensors tensors(spec);
      ASSERT_EQ(run_case(plan, spec, tensors), "") << kv_len;
      double error = 0.0;
      const auto oracle = core::reference_attend(spec.problem, tensors.inputs());
      ASSERT_EQ(judge_oracle(spec, tensors, oracle, &error), "") << "kv_len " << kv_len;
    }
  }
}

TEST_P(InvarianceTest, CapacityChangesNoBit) {
  for (const KvFormat format : kPlainFormats) {
    CaseSpec spec = typical(2, format, 128, 4, 2);
    spec.options.chunk_tokens = 64;
    spec.problem.max_kv_len = 197;
    const auto tight = result_bytes(spec);
    for (const std::int64_t capacity : {198, 394, 197 * 64}) {
      if (quick() && capacity > 1000) continue;
      CaseSpec larger = spec;
      larger.problem.max_kv_len = capacity;
      EXPECT_EQ(tight, result_bytes(larger)) << "max_kv_len " << capacity;
      CaseSpec sliced = spec;
      sliced.k.spare_tokens = capacity - 197;
      sliced.v.spare_tokens = 2 * (capacity - 197);
      EXPECT_EQ(tight, result_bytes(sliced)) << "slice of " << capacity;
    }
  }
}

// Every split from one token per chunk to more than there are tokens.
TEST_P(InvarianceTest, AnySplitAgreesWithTheOracle) {
  for (const KvFormat format : kPlainFormats) {
    CaseSpec spec = typical(3, format, 64, 7, 2);
    for (std::int64_t chunk = 1; chunk <= 260; chunk += quick() ? 23 : chunk < 70 ? 1 : 19) {
      spec.options.chunk_tokens = chunk;
      spec.seed = static_cast<std::uint64_t>(chunk);
      const CaseResult result = check_oracle(spec, device());
      ASSERT_EQ(result.status, CaseResult::passed) << spec.name << " chunk " << chunk << ' ' << result.detail;
    }
  }
}

TEST_P(InvarianceTest, WindowLeavesMostChunksEmpty) {
  for (const std::int64_t chunk : {1, 4, 16, 50, 100}) {
    for (const std::int64_t window : {1, 3, 20}) {
      CaseSpec spec = typical(4, KvFormat::f16, 64, 3, 2);
      spec.problem.window = window;
      spec.options.chunk_tokens = chunk;
      expect_oracle(spec);
    }
  }
}

// Eight single-token steps over a growing cache give what one causal step of eight tokens gives.
TEST_P(InvarianceTest, OneStepOfEightTokensEqualsEightSteps) {
  CaseSpec wide = typical(8, KvFormat::f32, 64, 3, 2);
  wide.problem.num_seqs = 1;
  wide.kv_lens = {150};
  const auto value = [](std::uint64_t seed) {
    return [seed](std::int64_t, std::int64_t head, std::int64_t token, std::int64_t d) {
      return normal_value(seed, static_cast<std::uint64_t>((head * 256 + token) * 64 + d));
    };
  };
  wide.q_value = value(1);
  wide.k_value = value(2);
  wide.v_value = value(3);
  CaseTensors together(wide);
  ASSERT_EQ(run_case(plan_case(wide, device()), wide, together), "");
  for (std::int64_t row = 0; row < 8; ++row) {
    CaseSpec step = wide;
    step.problem.q_len = 1;
    step.kv_lens = {static_cast<std::int32_t>(143 + row)};
    step.q_value = [&wide, row](std::int64_t seq, std::int64_t head, std::int64_t, std::int64_t d) {
      return wide.q_value(seq, head, row, d);
    };
    CaseTensors single(step);
    ASSERT_EQ(run_case(plan_case(step, device()), step, single), "");
    for (std::int64_t head = 0; head < 6; ++head) {
      EXPECT_NEAR(together.lse_value(0, head, row), single.lse_value(0, head, 0), 2e-6);
      for (std::int64_t d = 0; d < 64; ++d) {
        EXPECT_NEAR(together.out_value(0, head, row, d), single.out_value(0, head, 0, d), 2e-6);
      }
    }
  }
}

struct HostTeam {
  std::atomic<std::int64_t> calls{0};
  std::atomic<std::int64_t> bodies{0};
};

void run_backwards(void* host, std::int64_t count, void (*body)(void*, std::int64_t), void* body_context) {
  auto* team = static_cast<HostTeam*>(host);
  ++team->calls;
  for (std::int64_t i = count; i-- > 0;) {
    ++team->bodies;
    body(body_context, i);
  }
}

void run_on_threads(void* host, std::int64_t count, void (*body)(void*, std::int64_t), void* body_context) {
  auto* team = static_cast<HostTeam*>(host);
  ++team->calls;
  std::vector<std::thread> threads;
  for (std::int64_t i = 0; i < count; ++i) {
    threads.emplace_back([=] { body(body_context, i); });
    ++team->bodies;
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(InvarianceTest, TheHostsTeamGivesTheSameBits) {
  CaseSpec spec = typical(2, KvFormat::f16, 128, 4, 3);
  spec.num_threads = 4;
  spec.options.chunk_tokens = 32;
  const auto own = result_bytes(spec);
  for (const ParallelFor parallel_for : {run_backwards, run_on_threads}) {
    HostTeam team;
    Context context;
    context.parallel_for = parallel_for;
    context.parallel_for_host = &team;
    EXPECT_EQ(own, result_bytes(spec, context));
    EXPECT_GE(team.calls.load(), 1);
    EXPECT_GE(team.bodies.load(), 1);
  }
}

// Several callers share one plan, each with its own workspace and outputs.
TEST_P(InvarianceTest, ConcurrentCallersGetTheirOwnResults) {
  constexpr int kCallers = 4;
  const CaseSpec base = typical(2, KvFormat::bf16, 64, 4, 3);
  const Plan plan = plan_case(base, device());
  std::vector<CaseSpec> specs(kCallers, base);
  std::vector<std::vector<unsigned char>> expected(kCallers);
  std::vector<int> wrong(kCallers, 0);
  for (std::size_t i = 0; i < kCallers; ++i) {
    specs[i].seed = i + 1;
    expected[i] = result_bytes(specs[i]);
  }
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < kCallers; ++i) {
    callers.emplace_back([&, i] {
      CaseTensors tensors(specs[i]);
      for (int repeat = 0; repeat < (quick() ? 20 : 100); ++repeat) {
        wrong[i] += run_case(plan, specs[i], tensors).empty() ? 0 : 1;
        wrong[i] += tensors.result_bytes() == expected[i] ? 0 : 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int count : wrong) EXPECT_EQ(count, 0);
}

KVONCE_ON_EVERY_TARGET(InvarianceTest);

}  // namespace
}  // namespace kvonce::conformance
