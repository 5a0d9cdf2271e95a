#include "load_counter.hpp"

#include <algorithm>

namespace kvonce::test {
namespace {

std::vector<LoadCounter*>& watched() {
  static std::vector<LoadCounter*> counters;
  return counters;
}

void on_load(const void* address, std::size_t bytes) {
  for (LoadCounter* counter : watched()) counter->on_load(reinterpret_cast<std::uintptr_t>(address), bytes);
}

}  // namespace

LoadCounter::LoadCounter(const void* begin, std::size_t bytes, std::size_t row_bytes, std::size_t step_rows)
    : begin_(reinterpret_cast<std::uintptr_t>(begin)),
      bytes_(bytes),
      step_bytes_(row_bytes * step_rows),
      current_step_(step_bytes_ > 0 ? bytes / step_bytes_ + 1 : 0),
      fetches_(bytes / kPieceBytes, 0),
      last_visit_(bytes / kPieceBytes, 0) {
  watched().push_back(this);
}

LoadCounter::~LoadCounter() { std::erase(watched(), this); }

void LoadCounter::on_load(std::uintptr_t address, std::size_t bytes) {
  if (address + bytes <= begin_ || address >= begin_ + bytes_) return;
  const std::uintptr_t first = std::max(address, begin_) - begin_;
  const std::uintptr_t last = std::min(address + bytes, begin_ + bytes_) - begin_;
  if (step_bytes_ == 0) {
    ++visit_;
  } else if (first / step_bytes_ != current_step_) {
    current_step_ = first / step_bytes_;
    ++visit_;
  }
  for (std::uintptr_t piece = first / kPieceBytes; piece < (last + kPieceBytes - 1) / kPieceBytes; ++piece) {
    if (last_visit_[piece] == visit_) continue;
    last_visit_[piece] = visit_;
    ++fetches_[piece];
  }
}

}  // namespace kvonce::test

// The names gcc's instrumentation calls. Writes and function boundaries are of no interest.
extern "C" {
#define KVONCE_READ_HOOK(size) \
  void __tsan_read##size(void* address) { kvonce::test::on_load(address, size); }
#define KVONCE_UNALIGNED_READ_HOOK(size) \
  void __tsan_unaligned_read##size(void* address) { kvonce::test::on_load(address, size); }
#define KVONCE_WRITE_HOOK(size)     \
  void __tsan_write##size(void*) {} \
  void __tsan_unaligned_write##size(void*) {}
KVONCE_READ_HOOK(1)
KVONCE_READ_HOOK(2)
KVONCE_READ_HOOK(4)
KVONCE_READ_HOOK(8)
KVONCE_READ_HOOK(16)
KVONCE_UNALIGNED_READ_HOOK(2)
KVONCE_UNALIGNED_READ_HOOK(4)
KVONCE_UNALIGNED_READ_HOOK(8)
KVONCE_UNALIGNED_READ_HOOK(16)
KVONCE_WRITE_HOOK(1)
KVONCE_WRITE_HOOK(2)
KVONCE_WRITE_HOOK(4)
KVONCE_WRITE_HOOK(8)
KVONCE_WRITE_HOOK(16)
void __tsan_read_range(void* address, std::size_t bytes) { kvonce::test::on_load(address, bytes); }
void __tsan_write_range(void*, std::size_t) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
}
