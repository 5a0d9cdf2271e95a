#include "guarded_buffer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace kvonce::conformance {
namespace {

constexpr std::size_t kLead = 256;  // margin before the payload, beyond what rounding to pages adds

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, Place place, std::size_t offset) : bytes_(bytes) {
  const std::size_t mapped = (kLead + offset + bytes + kLead + kPage - 1) / kPage * kPage;
  mapping_bytes_ = mapped + 2 * kPage;
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<unsigned char*>(mapping);
  if (mprotect(mapping_ + kPage, mapped, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping_, mapping_bytes_);
    throw std::bad_alloc();
  }
  data_ = place == Place::kFlushEnd ? mapping_ + kPage + mapped - bytes : mapping_ + kPage + kLead + offset;
}

GuardedBuffer::~GuardedBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_bytes_(other.mapping_bytes_),
      data_(other.data_),
      bytes_(other.bytes_) {}

GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void GuardedBuffer::fill(const void* pattern, std::size_t unit) {
  unsigned char* begin = mapping_ + kPage;
  unsigned char* end = mapping_ + mapping_bytes_ - kPage;
  const auto* bytes = static_cast<const unsigned char*>(pattern);
  if (std::all_of(bytes, bytes + unit, [&](unsigned char b) { return b == bytes[0]; })) {
    std::memset(begin, bytes[0], static_cast<std::size_t>(end - begin));
    return;
  }
  const std::size_t before = static_cast<std::size_t>(data_ - begin) / unit;
  for (unsigned char* at = data_ - before * unit; at + unit <= end; at += unit) std::memcpy(at, pattern, unit);
}

bool GuardedBuffer::margins_are(unsigned char value) const {
  const auto is_value = [value](unsigned char b) { return b == value; };
  return std::all_of(mapping_ + kPage, data_, is_value) &&
         std::all_of(data_ + bytes_, mapping_ + mapping_bytes_ - kPage, is_value);
}

}  // namespace kvonce::conformance
