// The emulator itself: what collectives give, and that divergence ends the process.
#include "lanes.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace kvonce::emulation {
namespace {

using Body = std::function<void(int, int)>;

void run(int num_simdgroups, const Body& body, std::uint64_t seed = 1) {
  run_threadgroup(
      num_simdgroups, seed,
      [](void* context, int simdgroup, int lane) { (*static_cast<const Body*>(context))(simdgroup, lane); },
      const_cast<Body*>(&body));
}

TEST(LanesTest, CollectivesSeeAllLanesOfTheirSimdgroup) {
  std::vector<float> sums(64);
  std::vector<float> largest(64);
  std::vector<float> shuffled(64);
  std::vector<float> exchanged(64);
  run(2, [&](int simdgroup, int lane) {
    const auto at = static_cast<std::size_t>(simdgroup * 32 + lane);
    const auto mine = static_cast<float>(lane + 100 * simdgroup);
    sums[at] = collective(Collective::sum, mine);
    largest[at] = collective(Collective::max, mine);
    shuffled[at] = collective(Collective::shuffle, mine, 31 - lane);
    exchanged[at] = collective(Collective::shuffle_xor, mine, 5);
  });
  for (int i = 0; i < 64; ++i) {
    const int lane = i % 32;
    const int base = 100 * (i / 32);
    const auto at = static_cast<std::size_t>(i);
    EXPECT_EQ(sums[at], static_cast<float>(31 * 16 + 32 * base));
    EXPECT_EQ(largest[at], static_cast<float>(31 + base));
    EXPECT_EQ(shuffled[at], static_cast<float>(31 - lane + base));
    EXPECT_EQ(exchanged[at], static_cast<float>((lane ^ 5) + base));
  }
}

TEST(LanesTest, AMatrixProductIsTheProduct) {
  float result[8][8] = {};
  const auto row_of = [](int lane) { return (lane & 16) / 4 + (lane & 6) / 2; };
  const auto column_of = [](int lane) { return (lane & 8) / 2 + (lane & 1) * 2; };
  run(1, [&](int, int lane) {
    const int row = row_of(lane);
    const int column = column_of(lane);
    const auto a = [](int i, int k) { return static_cast<float>(i * 8 + k); };
    const auto b = [](int k, int j) { return static_cast<float>(k * 3 - j * j); };
    float d[2] = {1.0F, 1.0F};
    matrix_multiply_add(d, {a(row, column), a(row, column + 1)}, {b(row, column), b(row, column + 1)});
    result[row][column] = d[0];
    result[row][column + 1] = d[1];
  });
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) {
      float want = 1.0F;
      for (int k = 0; k < 8; ++k) want += static_cast<float>((i * 8 + k) * (k * 3 - j * j));
      EXPECT_EQ(result[i][j], want) << i << ' ' << j;
    }
  }
}

TEST(LanesTest, ABarrierOrdersSimdgroups) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<int> written(4 * 32, 0);
    int missed = 0;
    run(
        4,
        [&](int simdgroup, int lane) {
          written[static_cast<std::size_t>(simdgroup * 32 + lane)] = 1;
          threadgroup_barrier();
          for (const int value : written) missed += 1 - value;
        },
        seed);
    EXPECT_EQ(missed, 0);
  }
}

// The order is random, so that a missing barrier or a race between lanes shows.
TEST(LanesTest, LanesAndSimdgroupsRunInSeveralOrders) {
  int first_lane_was_first = 0;
  int first_simdgroup_was_first = 0;
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    std::vector<int> order;
    run(
        2, [&](int simdgroup, int lane) { order.push_back(simdgroup * 32 + lane); }, seed);
    first_simdgroup_was_first += order.front() < 32 ? 1 : 0;
    first_lane_was_first += order.front() % 32 == 0 ? 1 : 0;
  }
  EXPECT_GT(first_simdgroup_was_first, 8);
  EXPECT_LT(first_simdgroup_was_first, 56);
  EXPECT_LT(first_lane_was_first, 16);
}

TEST(LanesDeathTest, DivergenceEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(run(1,
                   [](int, int lane) {
                     if (lane != 7) collective(Collective::sum, 1.0F);
                   }),
               "divergent collective: different operations in simdgroup 0");
  EXPECT_DEATH(run(1, [](int, int lane) { collective(lane < 3 ? Collective::sum : Collective::max, 1.0F); }),
               "divergent collective: different operations");
  EXPECT_DEATH(run(1, [](int, int lane) { collective(Collective::shuffle_xor, 1.0F, lane < 3 ? 1 : 2); }),
               "divergent collective: different masks");
  EXPECT_DEATH(run(1, [](int, int lane) { collective(Collective::shuffle, 1.0F, lane + 1); }), "no such lane");
  EXPECT_DEATH(run(2,
                   [](int simdgroup, int) {
                     if (simdgroup == 0) threadgroup_barrier();
                   }),
               "a barrier that not every simdgroup reaches");
  EXPECT_DEATH(run(1,
                   [](int, int lane) {
                     if (lane < 16) threadgroup_barrier();
                     collective(Collective::sum, 1.0F);
                   }),
               "divergent collective: different operations");
}

}  // namespace
}  // namespace kvonce::emulation
