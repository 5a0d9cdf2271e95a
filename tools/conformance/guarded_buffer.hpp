// Memory whose every byte outside the payload is watched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvonce::conformance {

/// A payload between two unmapped pages: flush with the end one (the first byte past the payload faults), or `offset`
/// bytes after a 64-byte boundary. The mapped bytes around the payload are the margins.
class GuardedBuffer {
 public:
  enum class Place { kFlushEnd, kOffset };

  GuardedBuffer() = default;
  GuardedBuffer(std::size_t bytes, Place place, std::size_t offset = 0);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept;
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  [[nodiscard]] unsigned char* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// Payload and margins: whole pages.
  [[nodiscard]] unsigned char* mapped() const { return mapping_ == nullptr ? nullptr : mapping_ + kPage; }
  [[nodiscard]] std::size_t mapped_bytes() const { return mapping_ == nullptr ? 0 : mapping_bytes_ - 2 * kPage; }

  static constexpr std::size_t kPage = 4096;

  /// Sets every mapped byte. A pattern of `unit` bytes is laid so that it is in phase with the payload's start.
  void fill(const void* pattern, std::size_t unit);
  void fill_byte(unsigned char value) { fill(&value, 1); }

  /// True when every margin byte still is `value`.
  [[nodiscard]] bool margins_are(unsigned char value) const;

 private:
  unsigned char* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  unsigned char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace kvonce::conformance
