#include "affine_codes.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace kvonce::conformance {

void write_code(KvFormat format, std::int64_t code, std::int64_t idx, unsigned char* row) {
  if (format == KvFormat::mlx_int8) {
    row[idx] = static_cast<unsigned char>(code);
    return;
  }
  const int shift = idx % 2 == 0 ? 0 : 4;
  unsigned char& byte = row[idx / 2];
  byte = static_cast<unsigned char>((byte & (0xf0 >> shift)) | (code << shift));
}

AffineLevels write_codes(KvFormat format, const std::vector<double>& values, std::int64_t first, unsigned char* row) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const double largest_code = format == KvFormat::mlx_int8 ? 255.0 : 15.0;
  const double range = *high - *low;
  const double scale = range == 0.0 ? 1.0 : std::exp2(std::ceil(std::log2(range / largest_code)));
  // Codes above 0 where there is room: a bias that is left out then shows.
  const double lowest_code = std::min(3.0, std::floor(largest_code - range / scale));
  const double bias = *low - lowest_code * scale;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double code = (values[i] - bias) / scale;
    if (code != std::floor(code) || scale * code + bias != values[i]) {
      throw std::invalid_argument(std::to_string(values[i]) + " has no exact code among values from " +
                                  std::to_string(*low) + " to " + std::to_string(*high));
    }
    write_code(format, static_cast<std::int64_t>(code), first + static_cast<std::int64_t>(i), row);
  }
  return {scale, bias};
}

}  // namespace kvonce::conformance
