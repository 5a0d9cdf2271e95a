// A threadgroup on the host: one fiber per thread, simdgroups of 32 lanes in lockstep at their collective operations.
//
// A lane runs until it calls a collective or a barrier. A collective happens when all 32 lanes of the simdgroup have arrived
// at the same one; a barrier when every lane of the threadgroup has. Anything else ends the process with a message that begins
// "divergent collective". Between collectives the lanes run one after the other in random order, and so do simdgroups.
#pragma once

#include <cstdint>

namespace kvonce::emulation {

constexpr int kLanesOfSimdgroup = 32;

enum class Collective : std::uint8_t { none, sum, max, shuffle, shuffle_xor, matrix_multiply_add, barrier };

/// What was executed since reset_counts().
struct Counts {
  std::uint64_t collectives[7] = {};  // by Collective, once per simdgroup (barrier: per threadgroup)
  std::uint64_t lane_exp2 = 0;        // by lanes
  std::uint64_t lane_log2 = 0;
  std::uint64_t lane_tanh = 0;

  [[nodiscard]] std::uint64_t of(Collective operation) const { return collectives[static_cast<int>(operation)]; }
};
Counts& counts();
void reset_counts();

/// Runs body(context, simdgroup, lane) as num_simdgroups * 32 lanes. `seed` chooses the order. Not from within a lane.
void run_threadgroup(int num_simdgroups, std::uint64_t seed, void (*body)(void* context, int simdgroup, int lane),
                     void* context);

/// Called by a lane. `operand`: the lane to read from (shuffle) or the mask (shuffle_xor, the same in all lanes).
float collective(Collective operation, float value, int operand = 0);

/// d += a * b; a lane holds two neighbours of a row of each 8x8 matrix, placed as dialect.h says.
void matrix_multiply_add(float (&d)[2], const float (&a)[2], const float (&b)[2]);

/// All lanes of the threadgroup.
void threadgroup_barrier();

}  // namespace kvonce::emulation
