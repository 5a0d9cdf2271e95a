#include "kvonce/bench_buffer.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

namespace kvonce::tool {
namespace {

constexpr std::int64_t kHugePage = 2 * 1024 * 1024;
constexpr std::int64_t kFillBytes = 4 * 1024 * 1024;  // per task

// Random bits to values: sign, mantissa and the lowest exponent bit stay random, the rest of the exponent is set.
struct Pattern {
  std::uint32_t keep;
  std::uint32_t set;
};

Pattern pattern_of(KvFormat format) {
  switch (format) {
    case KvFormat::f32:  // the low half is an f16 by itself: qmv reads every buffer as f16
      return {0x80ff87ffU, 0x3f003800U};
    case KvFormat::f16:
      return {0x87ff87ffU, 0x38003800U};
    case KvFormat::bf16:
      return {0x80ff80ffU, 0x3f003f00U};
    case KvFormat::q8_0:  // codes; place_case() writes the scales, and the biases
    case KvFormat::q4_0:
    case KvFormat::mlx_int8:
    case KvFormat::mlx_int4:
      return {0xffffffffU, 0U};
    default:
      throw Error(ErrorCode::Unsupported,
                  fmt::format("--dtype: bench fills caches of f32, f16, bf16, q8_0, q4_0, mlx_int8 or mlx_int4, got {}",
                              to_string(format)));
  }
}

std::int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  }
  return std::numeric_limits<std::int64_t>::max();
}

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace

void fill_random(void* data, std::int64_t bytes, KvFormat format, std::uint64_t seed) {
  constexpr std::size_t kLanes = 16;  // independent generators side by side: the compiler makes vectors of them
  const Pattern pattern = pattern_of(format);
  std::array<std::uint32_t, kLanes> state{};
  for (std::size_t i = 0; i < kLanes; ++i) state[i] = static_cast<std::uint32_t>(mix(seed * kLanes + i)) | 1U;
  std::array<std::uint32_t, kLanes> values{};
  auto* const begin = static_cast<char*>(data);
  for (std::int64_t at = 0; at < bytes; at += static_cast<std::int64_t>(sizeof values)) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      state[i] ^= state[i] << 13;
      state[i] ^= state[i] >> 17;
      state[i] ^= state[i] << 5;
      values[i] = (state[i] & pattern.keep) | pattern.set;
    }
    const std::int64_t count = std::min(bytes - at, static_cast<std::int64_t>(sizeof values));
    std::memcpy(begin + at, values.data(), static_cast<std::size_t>(count));
  }
}

BenchBuffer::~BenchBuffer() { unmap(); }

void BenchBuffer::unmap() noexcept {
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes_);
  mapping_ = nullptr;
  bytes_ = 0;
  format_.reset();
}

void BenchBuffer::map(std::int64_t bytes) {
  unmap();
  const std::int64_t available = available_bytes();
  if (bytes > available - available / 8) {
    throw Error(ErrorCode::Unavailable,
                fmt::format("case: its rotating buffers take {:.1f} GiB, the machine has {:.1f} GiB available",
                            static_cast<double>(bytes) * 0x1p-30, static_cast<double>(available) * 0x1p-30));
  }
  mapping_bytes_ = static_cast<std::size_t>(bytes + kHugePage);
  void* const mapping =
      ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw Error(ErrorCode::Unavailable, fmt::format("case: its rotating buffers of {} bytes cannot be mapped", bytes));
  }
  mapping_ = mapping;
  const auto address = std::bit_cast<std::uintptr_t>(mapping);
  const auto huge = static_cast<std::uintptr_t>(kHugePage);
  data_ = static_cast<char*>(mapping) + ((huge - address % huge) % huge);
  bytes_ = bytes;
  // Advice only: without huge pages the figures are lower and still comparable.
  (void)::madvise(data_, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
}

void BenchBuffer::prepare(std::int64_t bytes, KvFormat format, bench::Team team) {
  (void)pattern_of(format);
  const std::int64_t wanted = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  if (wanted > bytes_) map(wanted);
  if (format_ == format) return;
  team.run((bytes_ + kFillBytes - 1) / kFillBytes, [&](std::int64_t task) {
    const std::int64_t begin = task * kFillBytes;
    const std::int64_t count = std::min(kFillBytes, bytes_ - begin);
    fill_random(data_ + begin, count, format, static_cast<std::uint64_t>(task) + 1);
  });
  format_ = format;
}

}  // namespace kvonce::tool
