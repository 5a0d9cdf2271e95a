// Pure streaming: the loops that compete for the title of ceiling. Included only by target translation units.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "baselines/target_kernels.hpp"

namespace kvonce::bench {
namespace {

// The compiler's own vectors: one xor per load on every target, so the loop is loads and nothing else.
using Bits16 [[gnu::vector_size(16)]] = std::uint64_t;
using Bits32 [[gnu::vector_size(32)]] = std::uint64_t;
using Bits64 [[gnu::vector_size(64)]] = std::uint64_t;

template <class Vec>
Vec load_bits(const char* address) {
  Vec value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

template <class Vec>
std::uint64_t fold_bits(Vec value) {
  std::uint64_t words[sizeof(Vec) / 8];
  std::memcpy(words, &value, sizeof value);
  std::uint64_t result = 0;
  for (const std::uint64_t word : words) result ^= word;
  return result;
}

// One stream, four accumulators; kPrefetchBytes > 0 prefetches that far ahead, one request per cache line.
template <class Vec, int kPrefetchBytes>
std::uint64_t read_one_stream(const void* data, std::size_t bytes) {
  constexpr std::size_t kVectorBytes = sizeof(Vec);
  constexpr std::size_t kBlock = 4 * kVectorBytes < 64 ? 64 : 4 * kVectorBytes;
  const char* const begin = static_cast<const char*>(data);
  Vec sums[4] = {};
  std::size_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) {
    if constexpr (kPrefetchBytes > 0) {
      for (std::size_t line = 0; line < kBlock; line += 64)
        __builtin_prefetch(begin + at + kPrefetchBytes + line, 0, 3);
    }
    for (std::size_t i = 0; i < kBlock / kVectorBytes; ++i)
      sums[i % 4] ^= load_bits<Vec>(begin + at + i * kVectorBytes);
  }
  for (; at < bytes; at += kVectorBytes) sums[0] ^= load_bits<Vec>(begin + at);
  return fold_bits((sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]));
}

// kNumStreams equal pieces read side by side, a cache line of each in turn: more pages in flight for the hardware
// prefetchers.
template <class Vec, int kNumStreams>
std::uint64_t read_streams(const void* data, std::size_t bytes) {
  constexpr std::size_t kVectorBytes = sizeof(Vec);
  const char* const begin = static_cast<const char*>(data);
  const std::size_t piece = bytes / kNumStreams / 64 * 64;
  Vec sums[kNumStreams] = {};
  for (std::size_t at = 0; at < piece; at += 64) {
    for (std::size_t s = 0; s < kNumStreams; ++s) {
      for (std::size_t i = 0; i < 64; i += kVectorBytes) sums[s] ^= load_bits<Vec>(begin + s * piece + at + i);
    }
  }
  for (std::size_t at = kNumStreams * piece; at < bytes; at += kVectorBytes) sums[0] ^= load_bits<Vec>(begin + at);
  Vec sum = {};
  for (const auto& part : sums) sum ^= part;
  return fold_bits(sum);
}

// kNumPages neighbouring 4 KiB pages side by side, each line prefetched one block of pages ahead.
template <class Vec, int kNumPages>
std::uint64_t read_pages(const void* data, std::size_t bytes) {
  constexpr std::size_t kVectorBytes = sizeof(Vec);
  constexpr std::size_t kPageBytes = 4096;
  constexpr std::size_t kBlock = kNumPages * kPageBytes;
  const char* const begin = static_cast<const char*>(data);
  Vec sums[kNumPages] = {};
  std::size_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) {
    for (std::size_t offset = 0; offset < kPageBytes; offset += 64) {
      for (std::size_t page = 0; page < kNumPages; ++page) {
        const char* const line = begin + at + page * kPageBytes + offset;
        __builtin_prefetch(line + kBlock, 0, 3);
        for (std::size_t i = 0; i < 64; i += kVectorBytes) sums[page] ^= load_bits<Vec>(line + i);
      }
    }
  }
  for (; at < bytes; at += kVectorBytes) sums[0] ^= load_bits<Vec>(begin + at);
  Vec sum = {};
  for (const auto& part : sums) sum ^= part;
  return fold_bits(sum);
}

template <class Vec>
constexpr std::array<ReadLoop, kNumReadLoops> make_read_loops() {
  return {{{"plain", read_one_stream<Vec, 0>},
           {"prefetch_1k", read_one_stream<Vec, 1024>},
           {"prefetch_4k", read_one_stream<Vec, 4096>},
           {"streams_4", read_streams<Vec, 4>},
           {"streams_8", read_streams<Vec, 8>},
           {"pages_8", read_pages<Vec, 8>}}};
}

}  // namespace
}  // namespace kvonce::bench
