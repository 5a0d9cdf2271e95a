// Values that MLX's affine formats hold without rounding, for inputs whose answer is exact.
#pragma once

#include <cstdint>
#include <vector>

#include "kvonce/types.hpp"

namespace kvonce::conformance {

struct AffineLevels {
  double scale;
  double bias;
};

/// Writes the codes of one group, values [first, first + values.size()) of the row at `row`, and returns the scale, a power of
/// two, and the bias with which scale * code + bias is each value. Throws std::invalid_argument where there are none.
AffineLevels write_codes(KvFormat format, const std::vector<double>& values, std::int64_t first, unsigned char* row);

/// Puts one code into a row.
void write_code(KvFormat format, std::int64_t code, std::int64_t idx, unsigned char* row);

}  // namespace kvonce::conformance
