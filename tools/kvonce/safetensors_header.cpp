#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "kvonce/safetensors.hpp"
#include "kvonce/types.hpp"

namespace kvonce::tool {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::InvalidArgument, message); }

struct DtypeBits {
  std::string_view name;
  std::uint64_t bits;
};

// Every dtype the format defines; those that kvonce cannot read may still be in a file.
constexpr std::array kDtypes = {
    DtypeBits{"F4", 4},      DtypeBits{"F6_E2M3", 6}, DtypeBits{"F6_E3M2", 6}, DtypeBits{"BOOL", 8},
    DtypeBits{"U8", 8},      DtypeBits{"I8", 8},      DtypeBits{"F8_E4M3", 8}, DtypeBits{"F8_E5M2", 8},
    DtypeBits{"F8_E8M0", 8}, DtypeBits{"U16", 16},    DtypeBits{"I16", 16},    DtypeBits{"F16", 16},
    DtypeBits{"BF16", 16},   DtypeBits{"U32", 32},    DtypeBits{"I32", 32},    DtypeBits{"F32", 32},
    DtypeBits{"C64", 64},    DtypeBits{"U64", 64},    DtypeBits{"I64", 64},    DtypeBits{"F64", 64}};

// Bytes of a tensor; nothing when the dtype is unknown, the size passes 64 bits or ends inside a byte.
std::optional<std::uint64_t> tensor_bytes(const TensorInfo& tensor) {
  const auto* dtype =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeBits& d) { return d.name == tensor.dtype; });
  if (dtype == kDtypes.end()) return std::nullopt;
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0U) != tensor.shape.end()) return 0;
  std::uint64_t bits = dtype->bits;
  for (const std::uint64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(bits, extent, &bits)) return std::nullopt;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

// Builds the header while the JSON is read, so that nothing but the format's own shape is ever held in memory.
class HeaderBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t /*num_elements*/) override {
    switch (place_) {
      case Place::outside:
        place_ = Place::top;
        return true;
      case Place::entry:
        if (is_metadata_) {
          place_ = Place::metadata;
        } else {
          place_ = Place::tensor;
          header_.tensors.push_back({.name = name_, .dtype = {}, .shape = {}, .begin = 0, .end = 0});
          fields_.clear();
        }
        return true;
      default:
        unexpected("an object");
    }
  }

  bool key(string_t& text) override {
    switch (place_) {
      case Place::top:
        if (!names_.insert(text).second) refuse(fmt::format("header has {} twice", in_quotes(text)));
        name_ = text;
        is_metadata_ = text == "__metadata__";
        place_ = Place::entry;
        return true;
      case Place::tensor:
        if (text != "dtype" && text != "shape" && text != "data_offsets") {
          refuse(fmt::format("tensor {} has the unknown key {}; allowed: dtype, shape, data_offsets", in_quotes(name_),
                             in_quotes(text)));
        }
        if (!fields_.insert(text).second) refuse(fmt::format("tensor {} has {} twice", in_quotes(name_), text));
        field_ = text;
        place_ = Place::field;
        return true;
      default:
        if (header_.metadata.contains(text)) refuse(fmt::format("__metadata__ has {} twice", in_quotes(text)));
        name_ = text;
        place_ = Place::metadata_value;
        return true;
    }
  }

  bool string(string_t& text) override {
    if (place_ == Place::field && field_ == "dtype") {
      header_.tensors.back().dtype = text;
      place_ = Place::tensor;
    } else if (place_ == Place::metadata_value) {
      header_.metadata.emplace(name_, text);
      place_ = Place::metadata;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool start_array(std::size_t /*num_elements*/) override {
    if (place_ != Place::field || field_ == "dtype") unexpected("an array");
    place_ = Place::numbers;
    numbers_.clear();
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (place_ != Place::numbers) unexpected("a number");
    if (numbers_.size() == kMaxRank) {
      refuse(fmt::format("tensor {}: {} has more than {} numbers", in_quotes(name_), field_, kMaxRank));
    }
    numbers_.push_back(number);
    return true;
  }

  bool end_array() override {
    TensorInfo& tensor = header_.tensors.back();
    if (field_ == "shape") {
      tensor.shape = numbers_;
    } else {
      if (numbers_.size() != 2) {
        refuse(fmt::format("tensor {}: data_offsets must hold 2 numbers, got {}", in_quotes(name_), numbers_.size()));
      }
      tensor.begin = numbers_[0];
      tensor.end = numbers_[1];
    }
    place_ = Place::tensor;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor && fields_.size() != 3) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!fields_.contains(field)) refuse(fmt::format("tensor {} has no {}", in_quotes(name_), field));
      }
    }
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool number_integer(number_integer_t number) override { unexpected(fmt::format("the number {}", number)); }
  bool number_float(number_float_t /*number*/, const string_t& text) override { unexpected("the number " + text); }
  bool boolean(bool value) override { unexpected(value ? "true" : "false"); }
  bool null() override { unexpected("null"); }
  bool binary(binary_t& /*value*/) override { unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string& /*last_token*/,
                   const nlohmann::json::exception& /*error*/) override {
    refuse(fmt::format("header is not valid JSON: error at byte {}", position));
  }

 private:
  enum class Place : std::uint8_t { outside, top, entry, tensor, field, numbers, metadata, metadata_value };
  static constexpr std::size_t kMaxRank = 64;

  [[noreturn]] void unexpected(const std::string& what) const {
    switch (place_) {
      case Place::outside:
        refuse(fmt::format("header must be an object, got {}", what));
      case Place::entry:
        refuse(fmt::format("header entry {} must be an object, got {}", in_quotes(name_), what));
      case Place::metadata_value:
        refuse(fmt::format("__metadata__ entry {} must be a string, got {}", in_quotes(name_), what));
      default:
        refuse(fmt::format("tensor {}: {} must be {}, got {}", in_quotes(name_), field_,
                           field_ == "dtype" ? "a string" : "an array of integers from 0 to 2^64 - 1",
                           in_quotes(what)));
    }
  }

  Place place_ = Place::outside;
  SafetensorsHeader header_;
  std::set<std::string> names_;   // of the header's entries
  std::set<std::string> fields_;  // of the current tensor
  std::string name_;              // of the current entry
  std::string field_;
  bool is_metadata_ = false;
  std::vector<std::uint64_t> numbers_;
};

void check_tensor(const TensorInfo& tensor, std::uint64_t data_bytes) {
  if (tensor.begin > tensor.end || tensor.end > data_bytes) {
    refuse(fmt::format("tensor {}: data_offsets [{}, {}] must lie in the {} bytes after the header",
                       in_quotes(tensor.name), tensor.begin, tensor.end, data_bytes));
  }
  const std::optional<std::uint64_t> expected = tensor_bytes(tensor);
  if (!expected) {
    refuse(fmt::format("tensor {}: dtype {} with shape [{}] is unknown or has no size in whole bytes below 2^61",
                       in_quotes(tensor.name), in_quotes(tensor.dtype), fmt::join(tensor.shape, ", ")));
  }
  if (*expected != tensor.num_bytes()) {
    refuse(fmt::format("tensor {}: {} [{}] takes {} bytes, but data_offsets [{}, {}] hold {}", in_quotes(tensor.name),
                       tensor.dtype, fmt::join(tensor.shape, ", "), *expected, tensor.begin, tensor.end,
                       tensor.num_bytes()));
  }
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kMaxShown = 80;
  std::string shown = "'";
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      shown += fmt::format("\\x{:02x}", byte);
    } else {
      shown += c;
    }
  }
  return shown + (text.size() > kMaxShown ? "...'" : "'");
}

const TensorInfo* SafetensorsHeader::find(std::string_view name) const noexcept {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [&](const TensorInfo& tensor) { return tensor.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

std::uint64_t parse_header_length(std::span<const char> first_bytes, std::uint64_t file_bytes) {
  constexpr std::uint64_t kLengthBytes = 8;
  if (first_bytes.size() < kLengthBytes || file_bytes < kLengthBytes) {
    refuse(fmt::format("file has {} bytes, fewer than the 8 of the header's length", file_bytes));
  }
  std::uint64_t length = 0;
  for (unsigned i = 0; i < kLengthBytes; ++i) {
    length |= static_cast<std::uint64_t>(static_cast<unsigned char>(first_bytes[i])) << (8 * i);
  }
  if (length > kMaxHeaderBytes) {
    refuse(fmt::format("header length is {} bytes, more than the allowed {}", length, kMaxHeaderBytes));
  }
  if (length > file_bytes - kLengthBytes) {
    refuse(fmt::format("header length is {} bytes, but the file ends {} bytes after it", length,
                       file_bytes - kLengthBytes));
  }
  return length;
}

SafetensorsHeader parse_header(std::string_view json, std::uint64_t data_bytes) {
  if (!json.starts_with('{')) refuse("header must start with '{'");
  HeaderBuilder builder;
  nlohmann::json::sax_parse(json.begin(), json.end(), &builder);
  SafetensorsHeader header = builder.take();

  for (const TensorInfo& tensor : header.tensors) check_tensor(tensor, data_bytes);
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  std::uint64_t covered = 0;
  for (const TensorInfo& tensor : header.tensors) {
    if (tensor.begin != covered) {
      refuse(fmt::format("tensor {}: data_offsets [{}, {}] {}; the next tensor must begin at byte {}",
                         in_quotes(tensor.name), tensor.begin, tensor.end,
                         tensor.begin < covered ? "overlap another tensor" : "leave a gap", covered));
    }
    covered = tensor.end;
  }
  if (covered != data_bytes) {
    refuse(fmt::format("tensors end at byte {} of the {} after the header; they must cover all", covered, data_bytes));
  }
  return header;
}

}  // namespace kvonce::tool
