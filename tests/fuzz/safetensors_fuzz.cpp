// Fuzz entry of the safetensors reader: whatever the bytes, parsing ends with an Error or with a header whose tensors
// tile the data.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "kvonce/safetensors.hpp"
#include "kvonce/types.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  try {
    const auto header_bytes =
        kvonce::tool::parse_header_length(std::span(file.data(), std::min<std::size_t>(size, 8)), size);
    const std::uint64_t data_bytes = size - 8 - header_bytes;
    const kvonce::tool::SafetensorsHeader header =
        kvonce::tool::parse_header(file.substr(8, static_cast<std::size_t>(header_bytes)), data_bytes);
    std::uint64_t covered = 0;
    for (const kvonce::tool::TensorInfo& tensor : header.tensors) {
      require(tensor.begin == covered && tensor.end >= tensor.begin);
      require(header.find(tensor.name) == &tensor);
      covered = tensor.end;
    }
    require(covered == data_bytes);
  } catch (const kvonce::Error& error) {
    const std::string_view message = error.what();
    require(error.code() == kvonce::ErrorCode::InvalidArgument);
    require(!message.empty() && message.find('\n') == std::string_view::npos);
    return -1;
  }
  return 0;
}
