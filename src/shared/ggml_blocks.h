// GGML's blocks of 32 values as they lie in memory, two-byte aligned.
#pragma once

#include <cstdint>

#include "shared/function.h"

namespace kvonce::shared {

constexpr int kGgmlBlockValues = 32;

/// q8_0: value i is scale * codes[i].
struct Q8Block {
  std::uint16_t scale;  // f16
  std::int8_t codes[kGgmlBlockValues];
};
static_assert(sizeof(Q8Block) == 34);

/// q4_0: value i is scale * (the low nibble of codes[i] - 8), value 16 + i the same of the high nibble.
struct Q4Block {
  std::uint16_t scale;  // f16
  std::uint8_t codes[kGgmlBlockValues / 2];
};
static_assert(sizeof(Q4Block) == 18);

}  // namespace kvonce::shared
