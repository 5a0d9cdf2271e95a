// How the arms that only stream load their bytes.
#pragma once

#include <cstdint>

namespace kvonce::bench::cuda {

/// 16 bytes that are read once: past L1, the whole 128-byte line on its way into L2.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

/// data[at], data[at + stride], ...: kLoads loads in flight, fewer where the range ends.
template <int kLoads>
__device__ __forceinline__ void load_round(uint4 (&words)[kLoads], const uint4* data, std::int64_t at, std::int64_t end,
                                           std::int64_t stride) {
  if (at + (kLoads - 1) * stride < end) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = load_once(data + at + i * stride);
  } else {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      words[i] = at + i * stride < end ? load_once(data + at + i * stride) : uint4{0, 0, 0, 0};
    }
  }
}

/// The xor of the 32-bit words of data[begin], data[begin + stride], ... up to `end`. kAhead: the next round is on its way
/// while one is awaited, which takes twice the registers.
template <int kLoads, bool kAhead>
__device__ __forceinline__ std::uint32_t xor_words(const uint4* data, std::int64_t begin, std::int64_t end,
                                                   std::int64_t stride) {
  std::uint32_t sum = 0;
  uint4 words[kLoads];
  if constexpr (kAhead) load_round(words, data, begin, end, stride);
  for (std::int64_t at = begin; at < end; at += kLoads * stride) {
    uint4 next[kLoads];
    if constexpr (kAhead) {
      load_round(next, data, at + kLoads * stride, end, stride);
    } else {
      load_round(words, data, at, end, stride);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) words[i] = next[i];
    }
  }
  return sum;
}

}  // namespace kvonce::bench::cuda
