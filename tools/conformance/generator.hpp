// Test data that any language can reproduce: no library random numbers.
#pragma once

#include <cstdint>

namespace kvonce::conformance {

/// Sebastiano Vigna's splitmix64 as a function of its counter.
inline std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Value i of stream `seed`: about N(0, 1), |x| <= 2 * sqrt(3). The sum of four 24-bit uniform fields, two of each hash.
inline double normal_value(std::uint64_t seed, std::uint64_t i) {
  const std::uint64_t first = splitmix64((seed << 32) + i);
  const std::uint64_t second = splitmix64(first);
  constexpr double kUnit = 1.0 / (1 << 24);
  const auto field = [](std::uint64_t h, int shift) { return static_cast<double>((h >> shift) & 0xffffffU) * kUnit; };
  const double sum = field(first, 0) + field(first, 24) + field(second, 0) + field(second, 24);
  return (sum - 2.0) * 1.7320508075688772;
}

/// Small integers and choices.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(splitmix64(seed)) {}
  std::uint64_t next() { return splitmix64(state_++); }
  /// In [0, count).
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(count));
  }
  /// In [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  template <typename Container>
  const typename Container::value_type& pick(const Container& values) {
    return values[static_cast<std::size_t>(below(static_cast<std::int64_t>(values.size())))];
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvonce::conformance
