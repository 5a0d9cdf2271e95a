#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/plan_data.hpp"
#include "kvonce/kvonce.hpp"
#include "shared/token_range.h"

namespace kvonce {
namespace {

// The portable target runs everywhere, and plans are pure integers: nothing here touches a tensor.
Device device(int num_threads = 2) {
  static const Device portable = cpu_device("portable", 1);
  Device result = portable;
  result.num_threads = num_threads;
  return result;
}

Problem decode_problem(std::int64_t num_q_heads = 32, std::int64_t num_kv_heads = 4, std::int64_t max_kv_len = 32768) {
  Problem p;
  p.num_q_heads = num_q_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim_qk = 128;
  p.max_kv_len = max_kv_len;
  p.k_format = p.v_format = KvFormat::bf16;
  return p;
}

PlanOptions with_chunk_tokens(std::int64_t chunk_tokens) {
  PlanOptions options;
  options.chunk_tokens = chunk_tokens;
  return options;
}

void expect_error(const std::function<void()>& call, ErrorCode code, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "accepted: " << words.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << "'" << word << "' in: " << error.what();
    }
  }
}

TEST(PlanTest, ChunksCoverTheLongestSequenceAndTheLastOneIsNotEmpty) {
  for (const std::int64_t max_kv_len : {1, 2, 63, 64, 65, 127, 128, 129, 1000, 1024, 4095, 4096, 4097, 100000}) {
    for (const std::int64_t chunk_tokens : {0, 1, 7, 64, 100, 1024, 5000}) {
      const Plan plan = make_plan(decode_problem(8, 1, max_kv_len), device(), with_chunk_tokens(chunk_tokens));
      const std::int64_t tokens = plan.policy().chunk_tokens;
      if (chunk_tokens != 0) {
        EXPECT_EQ(tokens, chunk_tokens);
      }
      EXPECT_GE(plan.max_chunks() * tokens, max_kv_len);
      EXPECT_LT((plan.max_chunks() - 1) * tokens, max_kv_len);
    }
  }
}

TEST(PlanTest, EverySequenceTouchesAtMostMaxChunksOfTheGrid) {
  for (const bool causal : {true, false}) {
    for (const std::int64_t window : {0, 1, 5, 64, 100, 1000}) {
      for (const std::int64_t q_len : {1, 3, 16}) {
        for (const std::int64_t chunk_tokens : {1, 10, 64}) {
          Problem p = decode_problem(2, 1, 300);
          p.causal = causal;
          p.window = window;
          p.q_len = q_len;
          const Plan plan = make_plan(p, device(), with_chunk_tokens(chunk_tokens));
          for (std::int64_t kv_len = 0; kv_len <= p.max_kv_len; ++kv_len) {
            std::int64_t begin = kv_len;
            std::int64_t end = 0;
            for (std::int64_t i = 0; i < q_len; ++i) {
              const shared::TokenRange seen = shared::visible_range(i, q_len, kv_len, 0, causal, window);
              if (seen.begin >= seen.end) continue;
              begin = std::min(begin, seen.begin);
              end = std::max(end, seen.end);
            }
            if (begin >= end) continue;
            const std::int64_t touched = (end - 1) / chunk_tokens - begin / chunk_tokens + 1;
            ASSERT_LE(touched, plan.max_chunks()) << "kv_len " << kv_len << " window " << window << " q_len " << q_len
                                                  << " chunk_tokens " << chunk_tokens << " causal " << causal;
          }
        }
      }
    }
  }
}

TEST(PlanTest, AWindowKeepsTheWorkspaceSmallWhateverTheCacheLength) {
  Problem p = decode_problem(8, 1, 1 << 30);
  p.window = 1024;
  const Plan windowed = make_plan(p, device(), with_chunk_tokens(256));
  EXPECT_LE(windowed.max_chunks(), 6);
  EXPECT_LT(windowed.workspace_bytes(), std::size_t{4} << 20);
}

TEST(PlanTest, KvIsReadOnceUpToAtLeast32Rows) {
  for (std::int64_t group = 1; group <= 32; ++group) {
    EXPECT_EQ(make_plan(decode_problem(4 * group, 4), device()).read_factor(), 1) << "group " << group;
  }
  Problem p = decode_problem(32, 8);
  p.q_len = 8;
  EXPECT_EQ(p.rows_per_stream(), 32);
  EXPECT_EQ(make_plan(p, device()).read_factor(), 1) << "4 heads x 8 query tokens";
}

TEST(PlanTest, ReadFactorIsTheNumberOfRowBlocks) {
  for (const std::int64_t rows_per_worker : {1, 2, 8, 31, 64}) {
    for (const std::int64_t group : {1, 3, 8, 71, 128}) {
      PlanOptions options;
      options.policy.rows_per_worker = rows_per_worker;
      options.policy.row_tile = 1;
      const Plan plan = make_plan(decode_problem(2 * group, 2), device(), options);
      EXPECT_EQ(plan.read_factor(), (group + rows_per_worker - 1) / rows_per_worker);
    }
  }
}

TEST(PlanTest, NothingThatDecidesTheBitsDependsOnTheNumberOfThreads) {
  const Plan one = make_plan(decode_problem(), device(1));
  for (const int threads : {2, 3, 7, 64, 1024}) {
    const Plan many = make_plan(decode_problem(), device(threads));
    EXPECT_EQ(to_string(many.policy()), to_string(one.policy()));
    EXPECT_EQ(many.kernel_id(), one.kernel_id());
    EXPECT_EQ(many.max_chunks(), one.max_chunks());
    EXPECT_EQ(many.read_factor(), one.read_factor());
    EXPECT_GT(many.workspace_bytes(), one.workspace_bytes()) << "each thread has its own scratch";
  }
}

TEST(PlanTest, ChunkTokensDependNeitherOnTheBatchNorOnTheCacheLength) {
  const std::int64_t expected = make_plan(decode_problem(), device()).policy().chunk_tokens;
  for (const std::int64_t num_seqs : {2, 5, 1000}) {
    for (const std::int64_t max_kv_len : {1, 2048, 1000000}) {
      Problem p = decode_problem(32, 4, max_kv_len);
      p.num_seqs = num_seqs;
      EXPECT_EQ(make_plan(p, device()).policy().chunk_tokens, expected);
    }
  }
}

TEST(PlanTest, EveryPolicyFieldIsDecidedAndAskedFieldsAreKept) {
  const Policy chosen = make_plan(decode_problem(), device()).policy();
  EXPECT_GT(chosen.row_tile, 0);
  EXPECT_GE(chosen.rows_per_worker, chosen.row_tile);
  EXPECT_GT(chosen.chunk_tokens, 0);
  EXPECT_GT(chosen.step_tokens, 0);
  EXPECT_GE(chosen.prefetch_tokens, 0);
  EXPECT_GT(chosen.prefetch_lines, 0);
  EXPECT_GE(chosen.pair_dot, 0);
  EXPECT_GT(chosen.worker_bytes, 0);
  EXPECT_GT(chosen.prefetch_level, 0);
  EXPECT_GT(chosen.heads_per_step, 0);

  PlanOptions options;
  options.policy = {2, 16, 640, 48, 0, 2, 0, 4096, 2, 3};
  const Policy kept = make_plan(decode_problem(), device(), options).policy();
  EXPECT_EQ(to_string(kept), to_string(options.policy));
}

TEST(PlanTest, PrefetchesGoIntoL2WhereTheProcessorFollowsThem) {
  Device known = device();
  known.follows_prefetches = false;
  EXPECT_EQ(make_plan(decode_problem(), known).policy().prefetch_level, 1);
  known.follows_prefetches = true;
  EXPECT_EQ(make_plan(decode_problem(), known).policy().prefetch_level, 2);
  EXPECT_GT(make_plan(decode_problem(), known).policy().prefetch_tokens, 0);
}

TEST(PlanTest, ChunkTokensGivenTwiceMustAgree) {
  PlanOptions options = with_chunk_tokens(512);
  options.policy.chunk_tokens = 512;
  EXPECT_EQ(make_plan(decode_problem(), device(), options).policy().chunk_tokens, 512);
  options.policy.chunk_tokens = 256;
  expect_error([&] { make_plan(decode_problem(), device(), options); }, ErrorCode::InvalidArgument,
               {"chunk_tokens", "512", "256"});
}

TEST(PlanTest, ImpossiblePolicyFieldsAreRefusedByName) {
  struct Case {
    const char* name;
    std::int64_t Policy::*field;
    std::int64_t value;
  };
  const Case cases[] = {
      {"row_tile", &Policy::row_tile, 9},
      {"row_tile", &Policy::row_tile, -1},
      {"rows_per_worker", &Policy::rows_per_worker, -1},
      {"chunk_tokens", &Policy::chunk_tokens, -1},
      {"step_tokens", &Policy::step_tokens, -16},
      {"step_tokens", &Policy::step_tokens, 1LL << 40},
      {"prefetch_tokens", &Policy::prefetch_tokens, 1LL << 40},
      {"prefetch_lines", &Policy::prefetch_lines, 3},
      {"prefetch_lines", &Policy::prefetch_lines, -1},
      {"pair_dot", &Policy::pair_dot, 1},
      {"pair_dot", &Policy::pair_dot, -2},
      {"worker_bytes", &Policy::worker_bytes, -1},
      {"prefetch_level", &Policy::prefetch_level, 3},
      {"prefetch_level", &Policy::prefetch_level, -1},
      {"heads_per_step", &Policy::heads_per_step, 9},
      {"heads_per_step", &Policy::heads_per_step, -1},
      {"chunk_tokens", &Policy::chunk_tokens, std::numeric_limits<std::int64_t>::max()},
      {"rows_per_worker", &Policy::rows_per_worker, std::numeric_limits<std::int64_t>::max()},
  };
  for (const Case& c : cases) {
    PlanOptions options;
    options.policy.*c.field = c.value;
    expect_error([&] { make_plan(decode_problem(), device(), options); }, ErrorCode::InvalidArgument,
                 {c.name, std::to_string(c.value)});
  }
  expect_error([] { make_plan(decode_problem(), device(), with_chunk_tokens(-64)); }, ErrorCode::InvalidArgument,
               {"chunk_tokens", "-64"});
}

TEST(PlanTest, KernelIdNamesTargetFormatsDimsAndRowTile) {
  EXPECT_EQ(make_plan(decode_problem(2, 2), device()).kernel_id(), "attend_portable_bf16_d128x128_r1");
  Problem p = decode_problem(2, 1);
  p.v_format = KvFormat::f16;
  EXPECT_EQ(make_plan(p, device()).kernel_id(), "attend_portable_kbf16_vf16_d128x128_r2");
  p = decode_problem(1, 1);
  p.head_dim_qk = 192;
  p.head_dim_v = 128;
  EXPECT_EQ(make_plan(p, device()).kernel_id(), "attend_portable_bf16_d192x128_r1");
  p.head_dim_qk = 72;
  EXPECT_EQ(make_plan(p, device()).kernel_id(), "attend_portable_bf16_dany_r1");
  p = decode_problem();
  PlanOptions options;
  options.policy.row_tile = 3;
  EXPECT_EQ(make_plan(p, device(), options).kernel_id(), "attend_portable_bf16_d128x128_r3") << "8 rows as 3 + 3 + 2";
}

TEST(PlanTest, KvBytesCountEachByteOnce) {
  Problem p = decode_problem(32, 4, 1000);
  p.num_seqs = 3;
  p.head_dim_v = 64;
  EXPECT_EQ(make_plan(p, device()).max_kv_bytes(), 3 * 4 * 1000 * (128 + 64) * 2);
  p.v_format = KvFormat::f32;
  EXPECT_EQ(make_plan(p, device()).max_kv_bytes(), 3 * 4 * 1000 * (128 * 2 + 64 * 4));
  p.v_format = KvFormat::bf16;
  p.v_is_k_prefix = true;
  EXPECT_EQ(make_plan(p, device()).max_kv_bytes(), 3 * 4 * 1000 * 128 * 2);
  p.q_len = 64;
  p.num_q_heads = 4 * 128;
  EXPECT_EQ(make_plan(p, device()).max_kv_bytes(), 3 * 4 * 1000 * 128 * 2) << "whatever the read factor";
}

TEST(PlanTest, EmptyProblemsPlan) {
  for (std::int64_t Problem::*field : {&Problem::num_seqs, &Problem::q_len}) {
    Problem p = decode_problem();
    p.*field = 0;
    EXPECT_EQ(make_plan(p, device()).workspace_bytes(), 0U) << "nothing runs";
  }
  const Plan no_keys = make_plan(decode_problem(32, 4, 0), device());
  EXPECT_GE(no_keys.max_chunks(), 1) << "rows without keys still have to be written";
  EXPECT_EQ(no_keys.max_kv_bytes(), 0);
}

TEST(PlanTest, WorkspacePartsAreAlignedAndDoNotOverlap) {
  std::mt19937 random(11);
  for (int repeat = 0; repeat < 500; ++repeat) {
    Problem p = decode_problem(1, 1 + random() % 8, random() % 5000);
    p.num_q_heads = p.num_kv_heads * static_cast<std::int64_t>(1 + random() % 40);
    p.num_seqs = 1 + random() % 4;
    p.q_len = 1 + random() % 9;
    p.head_dim_qk = 1 + random() % 1024;
    p.head_dim_v = 1 + random() % 1024;
    const int threads = 1 + static_cast<int>(random() % 9);
    const Plan plan = make_plan(p, device(threads));
    const core::WorkspaceLayout& w = plan.data().workspace;
    const auto streams = static_cast<std::size_t>(p.num_seqs * p.num_kv_heads);
    const std::size_t partials = streams * static_cast<std::size_t>(p.rows_per_stream() * plan.max_chunks());
    struct Part {
      std::size_t begin;
      std::size_t bytes;
    };
    std::vector<Part> parts = {
        {w.item_starts, 8 * static_cast<std::size_t>(p.num_seqs + 1)},
        {w.runs, 64 * static_cast<std::size_t>(threads)},
        {w.counters, 4 * streams * static_cast<std::size_t>(plan.read_factor())},
        {w.partial_lse, 4 * partials},
        {w.partial_o, 4 * partials * static_cast<std::size_t>(p.head_dim_v)},
        {w.scratch, w.scratch_bytes * static_cast<std::size_t>(threads * plan.policy().heads_per_step)},
    };
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
    for (std::size_t i = 0; i < parts.size(); ++i) {
      ASSERT_EQ(parts[i].begin % 64, 0U);
      if (i > 0) {
        ASSERT_GE(parts[i].begin, parts[i - 1].begin + parts[i - 1].bytes) << "part " << i;
      }
    }
    ASSERT_EQ(w.scratch_bytes % 64, 0U) << "two workers never share a cache line";
    ASSERT_GE(plan.workspace_bytes(), parts.back().begin + parts.back().bytes + 63) << "room to align any base";
  }
}

TEST(PlanTest, AWorkspaceBeyondTheAddressSpaceIsRefused) {
  Problem p = decode_problem(1 << 20, 1, 2147483647);
  p.num_seqs = 1 << 20;
  p.q_len = 64;
  p.head_dim_qk = 1024;
  expect_error([&] { make_plan(p, device(), with_chunk_tokens(1)); }, ErrorCode::InvalidArgument, {"workspace"});
}

TEST(PlanTest, RandomProblemsEitherPlanOrAreRefusedWithAMessage) {
  std::mt19937_64 random(12);
  const auto any_of = [&](std::initializer_list<std::int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  int planned = 0;
  int refused = 0;
  for (int repeat = 0; repeat < 5000; ++repeat) {
    Problem p;
    p.num_seqs = any_of({0, 1, 2, 3, 100, 1 << 20, -1});
    p.q_len = any_of({0, 1, 2, 8, 64, 65});
    p.num_kv_heads = any_of({1, 2, 3, 4, 8, 1 << 20, 0});
    p.num_q_heads = p.num_kv_heads * any_of({1, 2, 3, 8, 71, 128});
    p.head_dim_qk = any_of({1, 63, 64, 128, 576, 1024, 1025});
    p.head_dim_v = any_of({0, 1, 64, 512, 1024, -1});
    p.max_kv_len = any_of({0, 1, 4096, 2147483647, 2147483648LL});
    p.window = any_of({0, 1, 128, 2147483647, -1});
    p.k_format = static_cast<KvFormat>(random() % 4);
    p.v_format = static_cast<KvFormat>(random() % 4);
    p.causal = random() % 2 == 0;
    PlanOptions options;
    options.policy.row_tile = any_of({0, 0, 1, 4, 5});
    options.policy.rows_per_worker = any_of({0, 0, 1, 8, 8192, 8193});
    options.policy.chunk_tokens = any_of({0, 0, 1, 100, 1LL << 31});
    options.policy.step_tokens = any_of({0, 0, 16, 17, 1024});
    try {
      const Plan plan = make_plan(p, device(), options);
      ++planned;
      ASSERT_GE(plan.read_factor(), 1);
      ASSERT_GE(plan.max_chunks(), 1);
      ASSERT_GE(plan.max_kv_bytes(), 0);
      if (p.num_seqs > 0 && p.q_len > 0) {
        ASSERT_GT(plan.workspace_bytes(), 0U);
      }
      ASSERT_FALSE(plan.explain().empty());
    } catch (const Error& error) {
      ++refused;
      ASSERT_NE(error.code(), ErrorCode::Internal) << error.what();
      ASSERT_GT(std::string(error.what()).size(), 20U);
    }
  }
  EXPECT_GT(planned, 100);
  EXPECT_GT(refused, 100);
}

TEST(PlanTest, WhatTheBackendDoesNotServeIsRefusedWithAnAlternative) {
  const auto unsupported = [](const std::function<void(Problem&)>& change, const std::string& name) {
    Problem p = decode_problem();
    change(p);
    expect_error([&] { make_plan(p, device()); }, ErrorCode::Unsupported, {name, "; "});
  };
  unsupported([](Problem& p) { p.k_format = KvFormat::f8_e4m3; }, "k_format");
  unsupported([](Problem& p) { p.v_format = KvFormat::f8_e4m3; }, "v_format");
  unsupported([](Problem& p) { p.has_segments = true; }, "segments");
  unsupported(
      [](Problem& p) {
        p.layout = KvLayout::paged_nhd;
        p.page_size = 16;
      },
      "layout");
  PlanOptions options;
  options.earlier_kv_ready = true;
  expect_error([&] { make_plan(decode_problem(), device(), options); }, ErrorCode::Unsupported, {"earlier_kv_ready"});
}

TEST(PlanTest, AnInvalidProblemIsRefusedBeforeAnythingElse) {
  Problem p = decode_problem();
  p.num_q_heads = 33;
  p.has_segments = true;  // not served either, but the problem itself is wrong
  Device missing = device();
  missing.unavailable = "not here";
  expect_error([&] { make_plan(p, missing); }, ErrorCode::InvalidArgument, {"num_q_heads", "33"});
}

TEST(PlanTest, AnUnavailableDeviceSaysWhy) {
  Device missing = device();
  missing.unavailable = "this processor has no such instructions";
  expect_error([&] { make_plan(decode_problem(), missing); }, ErrorCode::Unavailable, {missing.unavailable});
  Device unknown = device();
  unknown.target = "avx1024";
  expect_error([&] { make_plan(decode_problem(), unknown); }, ErrorCode::Unavailable, {"avx1024"});
  for (const Backend backend : {Backend::cuda, Backend::metal}) {
    Device other = device();
    other.backend = backend;
    other.target.clear();
    expect_error([&] { make_plan(decode_problem(), other); }, ErrorCode::Unavailable,
                 {std::string(to_string(backend))});
  }
}

TEST(PlanTest, ThreadCountsOutsideTheLimitsAreRefused) {
  for (const int threads : {0, -1, 1025}) {
    Device bad = device();
    bad.num_threads = threads;
    expect_error([&] { make_plan(decode_problem(), bad); }, ErrorCode::InvalidArgument,
                 {"num_threads", std::to_string(threads)});
  }
}

TEST(PlanTest, ExplainStatesWhatWillRun) {
  Device known = device(3);
  known.read_gbps = 50.0;
  const Plan plan = make_plan(decode_problem(32, 4, 8192), known);
  const std::string text = plan.explain();
  for (const std::string& part :
       {std::string(plan.kernel_id()), to_string(plan.policy()), std::string("read factor"), std::string("workspace"),
        std::string("32q/4kv"), std::string("3 threads"), std::string("rejected")}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
  // 4 heads x 8192 tokens x 256 values x 2 bytes = 16.8 MB: 335.5 us at 50 GB/s.
  EXPECT_NE(text.find("335.5 us"), std::string::npos) << text;
  known.read_gbps = 0.0;
  EXPECT_NE(make_plan(decode_problem(), known).explain().find("unknown"), std::string::npos);
}

TEST(PlanTest, CopiesShareOnePlan) {
  const Plan plan = make_plan(decode_problem(), device());
  const Plan copy = plan;  // NOLINT(performance-unnecessary-copy-initialization)
  EXPECT_EQ(&plan.data(), &copy.data());
}

TEST(PlanTest, PolicyTextRoundTrips) {
  const Policy parsed = parse_policy("row_tile=4,chunk_tokens=2048");
  EXPECT_EQ(parsed.row_tile, 4);
  EXPECT_EQ(parsed.chunk_tokens, 2048);
  EXPECT_EQ(parsed.rows_per_worker, 0);
  EXPECT_EQ(parsed.prefetch_tokens, -1);
  const Policy all{1, 2, 3, 16, 0, 1, 1, 1, 1};
  EXPECT_EQ(to_string(parse_policy(to_string(all))), to_string(all));
  EXPECT_EQ(to_string(parse_policy("")), to_string(Policy()));
}

TEST(PlanTest, PolicyTextErrorsNameTheItem) {
  for (const char* bad : {"row_tiles=4", "row_tile", "row_tile=", "row_tile=x", "row_tile=4x", "row_tile=-1", "=3",
                          "row_tile=4,,chunk_tokens=1", "row_tile=4,row_tile=4", "prefetch_tokens=-2",
                          "row_tile=99999999999999999999", "chunk_tokens=9223372036854775807", " row_tile=4"}) {
    expect_error([bad] { parse_policy(bad); }, ErrorCode::InvalidArgument, {"policy"});
  }
}

TEST(PlanTest, AttendRefusesAWorkspaceThatIsTooSmallAndThreadsThePlanDoesNotHave) {
  Problem p = decode_problem(1, 1, 1);
  p.head_dim_qk = 1;
  const Plan plan = make_plan(p, device(2));
  std::uint16_t kv = 0;
  const float q = 0.0F;
  float out = 7.0F;
  Inputs inputs;
  inputs.q.data = &q;
  inputs.k.data = inputs.v.data = &kv;
  Outputs outputs;
  outputs.out = &out;
  std::vector<char> workspace(plan.workspace_bytes());
  const auto run = [&](void* memory, std::size_t bytes, int threads) {
    Context context;
    context.num_threads = threads;
    attend(plan, inputs, outputs, memory, bytes, context);
  };
  expect_error([&] { run(workspace.data(), workspace.size() - 1, 0); }, ErrorCode::InvalidArgument,
               {"workspace", std::to_string(workspace.size())});
  expect_error([&] { run(nullptr, workspace.size(), 0); }, ErrorCode::InvalidArgument, {"workspace", "null"});
  expect_error([&] { run(workspace.data(), workspace.size(), 3); }, ErrorCode::InvalidArgument, {"num_threads", "3"});
  expect_error([&] { run(workspace.data(), workspace.size(), -1); }, ErrorCode::InvalidArgument, {"num_threads", "-1"});
  EXPECT_EQ(out, 7.0F) << "nothing is written when a call is refused";
  run(workspace.data(), workspace.size(), 2);
  EXPECT_EQ(out, 0.0F);
}

}  // namespace
}  // namespace kvonce
