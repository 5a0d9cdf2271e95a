#include "kvonce/plan_cache.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kvonce/policy_file.hpp"

namespace kvonce {
namespace {

Device device() {
  static const Device portable = cpu_device("portable", 1);
  return portable;
}

Problem decode_problem(std::int64_t max_kv_len = 1000) {
  Problem p;
  p.num_q_heads = 8;
  p.num_kv_heads = 2;
  p.head_dim_qk = 64;
  p.max_kv_len = max_kv_len;
  return p;
}

TEST(PlanCacheTest, EqualCallsGetOnePlan) {
  PlanCache cache;
  const std::shared_ptr<CachedPlan> first = cache.find(decode_problem(), device());
  EXPECT_EQ(cache.find(decode_problem(), device()), first);
  EXPECT_EQ(cache.size(), 1U);
  EXPECT_EQ(first->plan.kernel_id(), make_plan(decode_problem(), device()).kernel_id());
}

TEST(PlanCacheTest, WhateverDiffersGetsAPlanOfItsOwn) {
  const std::vector<std::function<void(Problem&, Device&, PlanOptions&)>> changes = {
      [](Problem&, Device&, PlanOptions&) {},
      [](Problem& p, Device&, PlanOptions&) { p.num_seqs = 3; },
      [](Problem& p, Device&, PlanOptions&) { p.q_len = 2; },
      [](Problem& p, Device&, PlanOptions&) { p.num_q_heads = 4; },
      [](Problem& p, Device&, PlanOptions&) { p.num_kv_heads = 1; },
      [](Problem& p, Device&, PlanOptions&) { p.head_dim_qk = 80; },
      [](Problem& p, Device&, PlanOptions&) { p.head_dim_v = 32; },
      [](Problem& p, Device&, PlanOptions&) { p.q_dtype = DType::f16; },
      [](Problem& p, Device&, PlanOptions&) { p.out_dtype = DType::f16; },
      [](Problem& p, Device&, PlanOptions&) { p.k_format = KvFormat::f16; },
      [](Problem& p, Device&, PlanOptions&) { p.v_format = KvFormat::f16; },
      [](Problem& p, Device&, PlanOptions&) { p.v_is_k_prefix = true; },
      [](Problem& p, Device&, PlanOptions&) { p.scale = 0.5F; },
      [](Problem& p, Device&, PlanOptions&) { p.causal = false; },
      [](Problem& p, Device&, PlanOptions&) { p.window = 50; },
      [](Problem& p, Device&, PlanOptions&) { p.has_sinks = true; },
      [](Problem&, Device& d, PlanOptions&) { d.num_threads = 2; },
      [](Problem&, Device& d, PlanOptions&) { d.l2_bytes += 4096; },
      [](Problem&, Device&, PlanOptions& o) { o.chunk_tokens = 100; },
      [](Problem&, Device&, PlanOptions& o) { o.policy.row_tile = 2; },
      [](Problem&, Device&, PlanOptions& o) { o.policy_file = std::make_shared<const PolicyFile>(); },
  };
  PlanCache cache;
  std::set<std::shared_ptr<CachedPlan>> plans;
  for (int round = 0; round < 2; ++round) {
    plans.clear();
    for (const auto& change : changes) {
      Problem problem = decode_problem();
      Device changed = device();
      PlanOptions options;
      change(problem, changed, options);
      plans.insert(cache.find(problem, changed, options));
    }
    EXPECT_EQ(plans.size(), changes.size());
  }
  EXPECT_EQ(cache.size(), changes.size() + 1) << "the rules of the second round are another object";
}

TEST(PlanCacheTest, AGrowingCacheMeetsOnePlanPerDoubling) {
  PlanCache cache;
  std::set<std::shared_ptr<CachedPlan>> plans;
  for (std::int64_t kv_len = 1025; kv_len <= 2048; ++kv_len) {
    const std::shared_ptr<CachedPlan> found = cache.find(decode_problem(kv_len), device());
    EXPECT_EQ(found->plan.problem().max_kv_len, 2048);
    plans.insert(found);
  }
  EXPECT_EQ(plans.size(), 1U);
}

TEST(PlanCacheTest, RoundingStaysWithinWhatAPlanMayHave) {
  PlanCache cache;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const std::int64_t kv_len : {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, std::int64_t{8},
                                    std::int64_t{1} << 30, (std::int64_t{1} << 30) + 1, kMost}) {
    EXPECT_EQ(cache.find(decode_problem(kv_len), device())->plan.problem().max_kv_len, kv_len);
  }
}

TEST(PlanCacheTest, TheOneFoundLongestAgoIsDroppedWithItsAttachment) {
  PlanCache cache(2);
  std::vector<std::weak_ptr<void>> attachments;
  const auto find = [&](float scale) {
    Problem problem = decode_problem();
    problem.scale = scale;
    const std::shared_ptr<CachedPlan> found = cache.find(problem, device());
    if (found->attachment == nullptr) attachments.emplace_back(found->attachment = std::make_shared<int>(1));
  };
  find(0.1F);
  find(0.2F);
  find(0.1F);
  find(0.3F);
  ASSERT_EQ(attachments.size(), 3U);
  EXPECT_FALSE(attachments[0].expired());
  EXPECT_TRUE(attachments[1].expired());
  EXPECT_FALSE(attachments[2].expired());
  EXPECT_EQ(cache.size(), 2U);
}

TEST(PlanCacheTest, ADroppedAttachmentMayCallTheCache) {
  PlanCache cache(1);
  std::size_t seen = 0;
  cache.find(decode_problem(), device())->attachment =
      std::shared_ptr<void>(&seen, [&cache, &seen](void*) { seen = cache.size(); });
  (void)cache.find(decode_problem(2000), device());
  EXPECT_EQ(seen, 1U);
}

TEST(PlanCacheTest, WhatIsRefusedIsNotKept) {
  PlanCache cache;
  for (const std::int64_t max_kv_len : {std::int64_t{-1}, std::int64_t{1} << 31}) {
    EXPECT_THROW((void)cache.find(decode_problem(max_kv_len), device()), Error);
  }
  EXPECT_EQ(cache.size(), 0U);
  EXPECT_THROW(PlanCache(0), Error);
}

TEST(PlanCacheTest, ThreadsShareOneCache) {
  PlanCache cache(8);
  std::vector<std::shared_ptr<CachedPlan>> seen(4 * 16);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&cache, &seen, t] {
      for (std::size_t i = 0; i < 400; ++i) {
        Problem problem = decode_problem();
        problem.q_len = static_cast<std::int64_t>(1 + (i * 7 + t) % 16);
        const std::shared_ptr<CachedPlan> found = cache.find(problem, device());
        EXPECT_EQ(found->plan.problem().q_len, problem.q_len);
        seen[t * 16 + i % 16] = found;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(cache.size(), 8U);
}

}  // namespace
}  // namespace kvonce
