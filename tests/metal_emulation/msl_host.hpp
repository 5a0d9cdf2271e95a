// The parts of Metal that src/metal/dialect.h and the kernels that MLX generates around the bodies name, for C++ on the host:
// their whole text compiles, and lanes are fibers (lanes.hpp). Used by tests/python/emulated_metal.py.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "lanes.hpp"
#include "msl_types.hpp"

#define device
#define constant
#define threadgroup
#define thread

using uint = unsigned int;
using ushort = unsigned short;

using kvonce::emulation::bfloat;
using kvonce::emulation::float2;
using kvonce::emulation::half;
using float16_t = half;
using bfloat16_t = bfloat;

struct uint3 {
  uint x, y, z;
};

namespace metal {

using kvonce::emulation::Collective;
using kvonce::emulation::collective;

inline float simd_sum(float x) { return collective(Collective::sum, x); }
inline float simd_max(float x) { return collective(Collective::max, x); }
inline float simd_shuffle(float x, ushort lane) { return collective(Collective::shuffle, x, lane); }
inline float simd_shuffle_xor(float x, ushort mask) { return collective(Collective::shuffle_xor, x, mask); }

enum class mem_flags : std::uint8_t { mem_threadgroup };
inline void threadgroup_barrier(mem_flags /*memory*/) { kvonce::emulation::threadgroup_barrier(); }

inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float fmax(float a, float b) { return std::fmax(a, b); }
namespace fast {
inline float exp2(float x) { return std::exp2(x); }
}  // namespace fast
namespace precise {
inline float log2(float x) { return std::log2(x); }
inline float tanh(float x) { return std::tanh(x); }
}  // namespace precise

template <typename T, int kRows, int kColumns>
struct simdgroup_matrix {
  using Elements = T[2];
  T elements[2];
  Elements& thread_elements() { return elements; }
};
inline void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<float, 8, 8>& a,
                                          simdgroup_matrix<float, 8, 8>& b, simdgroup_matrix<float, 8, 8>& c) {
  float sums[2] = {c.elements[0], c.elements[1]};
  kvonce::emulation::matrix_multiply_add(sums, a.elements, b.elements);
  d.elements[0] = sums[0];
  d.elements[1] = sums[1];
}

}  // namespace metal

namespace kvonce::emulation {

/// A kernel's threadgroup: buffers in the order of the signature, which ends with simdgroup, lane and threadgroup.
template <typename... Parameters>
struct MslRun {
  void (*kernel)(Parameters...);
  void** buffers;
  uint3 place;

  template <std::size_t... kIndices>
  void call(uint simdgroup, uint lane, std::index_sequence<kIndices...> /*indices*/) const {
    using Types = std::tuple<Parameters...>;
    kernel(static_cast<std::tuple_element_t<kIndices, Types>>(buffers[kIndices])..., simdgroup, lane, place);
  }
  static void run_lane(void* context, int simdgroup, int lane) {
    const auto& run = *static_cast<const MslRun*>(context);
    run.call(static_cast<uint>(simdgroup), static_cast<uint>(lane),
             std::make_index_sequence<sizeof...(Parameters) - 3>());
  }
};

/// Runs the grid, in threadgroups of num_simdgroups * 32 threads.
template <typename... Parameters>
void run_msl(void (*kernel)(Parameters...), void** buffers, const int (&grid)[3], int num_simdgroups) {
  for (int z = 0; z < grid[2]; ++z) {
    for (int y = 0; y < grid[1]; ++y) {
      for (int x = 0; x < grid[0]; ++x) {
        MslRun<Parameters...> run{kernel, buffers, {static_cast<uint>(x), static_cast<uint>(y), static_cast<uint>(z)}};
        run_threadgroup(num_simdgroups, static_cast<std::uint64_t>(x + 7 * y + 49 * z + 1),
                        MslRun<Parameters...>::run_lane, &run);
      }
    }
  }
}

}  // namespace kvonce::emulation
