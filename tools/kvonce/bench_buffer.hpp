// The memory that the cases rotate over: one large mapping, filled once per element type and used by all cases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "baselines/team.hpp"
#include "kvonce/types.hpp"

namespace kvonce::tool {

class BenchBuffer {
 public:
  BenchBuffer() = default;
  ~BenchBuffer();
  BenchBuffer(const BenchBuffer&) = delete;
  BenchBuffer& operator=(const BenchBuffer&) = delete;

  /// At least `bytes` of memory in huge pages where the system gives them, random values of `format` (f32, f16 or bf16)
  /// of magnitude 0.5 to 2, every 16-bit half a finite f16 too. A buffer that is large enough and of that format is
  /// kept. Throws Error{Unavailable} when the machine has less memory to give, Error{Unsupported} for other formats.
  void prepare(std::int64_t bytes, KvFormat format, bench::Team team);

  [[nodiscard]] char* data() const noexcept { return data_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

 private:
  void map(std::int64_t bytes);
  void unmap() noexcept;

  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  char* data_ = nullptr;  // 2 MiB aligned, inside the mapping
  std::int64_t bytes_ = 0;
  std::optional<KvFormat> format_;  // of the values that fill it
};

/// Random values of `format` for [data, data + bytes), the same for the same seed; bytes a multiple of 4.
void fill_random(void* data, std::int64_t bytes, KvFormat format, std::uint64_t seed);

}  // namespace kvonce::tool
