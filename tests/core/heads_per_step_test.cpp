// How many KV heads go step by step together: the CPU's choice.
#include <gtest/gtest.h>

#include "kvonce/kvonce.hpp"

namespace kvonce {
namespace {

struct Case {
  std::int64_t num_q_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_dim;
  std::int64_t q_len;
  std::int64_t expected;
};

// Equal parts of the heads; a step's K of a part's heads at most 128 KB, its rows at most 64.
TEST(HeadsPerStepTest, FitAWorkersCache) {
  Device device;
  device.target = "portable";
  const Case cases[] = {{1, 1, 64, 1, 1},   {9, 3, 64, 1, 3},   {32, 8, 64, 1, 8},  {20, 10, 64, 1, 5},
                        {22, 11, 64, 1, 6}, {32, 8, 128, 1, 4}, {20, 5, 128, 1, 3}, {32, 4, 128, 2, 4},
                        {32, 4, 128, 3, 2}, {32, 4, 128, 9, 1}, {8, 8, 1024, 1, 4}};
  for (const Case& c : cases) {
    Problem p;
    p.num_q_heads = c.num_q_heads;
    p.num_kv_heads = c.num_kv_heads;
    p.head_dim_qk = c.head_dim;
    p.q_len = c.q_len;
    p.max_kv_len = 8192;
    p.k_format = p.v_format = KvFormat::bf16;
    EXPECT_EQ(make_plan(p, device).policy().heads_per_step, c.expected)
        << c.num_q_heads << "q/" << c.num_kv_heads << "kv d" << c.head_dim << " q_len " << c.q_len;
  }
}

}  // namespace
}  // namespace kvonce
