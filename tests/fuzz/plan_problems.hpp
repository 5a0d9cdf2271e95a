// Problems, devices and options for make_plan, valid and invalid, up to the limits of 64 bits, and the judgement of what
// it makes of them. The choices come from a seed (plan_random.cpp) or from a fuzzer's bytes (plan_fuzz.cpp).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "conformance/generator.hpp"
#include "kvonce/kvonce.hpp"

namespace kvonce::fuzz {

/// A source of numbers.
class Choices {
 public:
  Choices() = default;
  Choices(const Choices&) = delete;
  Choices& operator=(const Choices&) = delete;
  virtual ~Choices() = default;

  /// In [0, count); count >= 1.
  virtual std::int64_t below(std::int64_t count) = 0;
  /// Any 64 bits.
  virtual std::int64_t any() = 0;

  /// In [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  template <typename Container>
  const typename Container::value_type& pick(const Container& values) {
    return values[static_cast<std::size_t>(below(static_cast<std::int64_t>(values.size())))];
  }
};

class SeededChoices final : public Choices {
 public:
  explicit SeededChoices(std::uint64_t seed) : random_(seed) {}
  std::int64_t below(std::int64_t count) override { return random_.below(count); }
  std::int64_t any() override { return static_cast<std::int64_t>(random_.next()); }

 private:
  conformance::Random random_;
};

/// Reads the fewest bytes that can hold each choice, so that a changed byte changes one choice; zeros after the end.
class ByteChoices final : public Choices {
 public:
  explicit ByteChoices(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  std::int64_t below(std::int64_t count) override;
  std::int64_t any() override { return static_cast<std::int64_t>(take(8)); }

 private:
  std::uint64_t take(int num_bytes);

  std::span<const std::uint8_t> bytes_;
};

struct Trial {
  Problem problem;
  Device device;
  PlanOptions options;
  unsigned refusal = 0;  // ErrorCode of a refusal; 0: planned
  std::string fault;     // empty, or what make_plan did wrong

  /// The problem, the device and the options on one line.
  [[nodiscard]] std::string describe() const;
};

/// The devices of this machine, and CUDA and Metal devices described by hand: to plan for one takes none.
std::vector<Device> known_devices();

/// Chooses a problem, a device among `known` and options, and plans. A plan whose every field makes sense, or an Error
/// with a known code and a message, is no fault.
Trial try_plan(Choices& choices, const std::vector<Device>& known);

}  // namespace kvonce::fuzz
