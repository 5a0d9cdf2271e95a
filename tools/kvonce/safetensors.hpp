// The safetensors file format: reading with every field checked, and writing that leaves either a whole file or none.
//
// A file is: the header's length (8 bytes, little-endian), the header (JSON), the tensors' bytes. The header maps each
// name to {"dtype", "shape", "data_offsets": [begin, end)}, offsets counted from the end of the header, and may hold
// "__metadata__", a map of strings. The tensors cover the bytes after the header without gaps or overlaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvonce::tool {

/// One tensor as the header describes it.
struct TensorInfo {
  std::string name;
  std::string dtype;                 // "F32", "BF16", ... as in the file
  std::vector<std::uint64_t> shape;  // row-major; empty for a scalar
  std::uint64_t begin = 0;           // bytes from the end of the header
  std::uint64_t end = 0;

  [[nodiscard]] std::uint64_t num_bytes() const noexcept { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;              // in order of their offsets
  std::map<std::string, std::string> metadata;  // "__metadata__"

  /// The tensor called `name`, or null.
  [[nodiscard]] const TensorInfo* find(std::string_view name) const noexcept;
};

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// The header's length from the first 8 bytes of a file of `file_bytes` bytes.
/// Throws Error{InvalidArgument} when the file is too short, or the length exceeds it or kMaxHeaderBytes.
std::uint64_t parse_header_length(std::span<const char> first_bytes, std::uint64_t file_bytes);

/// Parses and checks the header; `data_bytes` is what follows it in the file. Throws Error{InvalidArgument}: not JSON,
/// missing or repeated keys, an unknown dtype, a shape that does not match the offsets, gaps, overlaps, data missing.
SafetensorsHeader parse_header(std::string_view json, std::uint64_t data_bytes);

/// Bytes at a 64-byte boundary.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(std::size_t num_bytes);
  [[nodiscard]] std::byte* data() noexcept { return data_.get(); }
  [[nodiscard]] const std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte[], Free> data_;
  std::size_t size_ = 0;
};

/// An open file. Only the header is in memory; read() fetches one tensor.
class SafetensorsFile {
 public:
  /// Throws Error{InvalidArgument} naming `path` and what is wrong with it.
  explicit SafetensorsFile(std::string path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  [[nodiscard]] const SafetensorsHeader& header() const noexcept { return header_; }
  /// The bytes of a tensor of this file's header. Throws Error{InvalidArgument} when the file got shorter meanwhile.
  [[nodiscard]] AlignedBytes read(const TensorInfo& tensor) const;

 private:
  void read_at(std::uint64_t offset, void* destination, std::uint64_t num_bytes) const;

  std::string path_;
  int fd_ = -1;
  std::uint64_t data_offset_ = 0;  // of the first tensor byte in the file
  SafetensorsHeader header_;
};

/// A tensor to write; `data` holds the bytes that dtype and shape ask for.
struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::span<const std::byte> data;
};

/// Writes beside `path` under a temporary name, then renames. On failure throws Error{InvalidArgument}, leaves no new
/// file and an existing one as it was. A link is followed; anything else that is not a regular file is refused.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata);

/// Text from a file for a one-line message: in quotes, control characters as \xNN, shortened when long.
std::string in_quotes(std::string_view text);

}  // namespace kvonce::tool
