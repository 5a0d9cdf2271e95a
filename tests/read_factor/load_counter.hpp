// Counts how often the instrumented kernels fetch each piece of a K or V buffer from beyond the current token step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvonce::test {

/// One watched buffer. Loads of a piece within one visit to its token step count once: later row tiles reread the step
/// from the L1 cache. Coming back to a step after another step of the same buffer counts again. step_rows 0: every load counts.
class LoadCounter {
 public:
  static constexpr std::size_t kPieceBytes = 2;  // the smallest element

  /// Watches [begin, begin + bytes) as rows of row_bytes, step_rows rows to a step. Single-threaded.
  LoadCounter(const void* begin, std::size_t bytes, std::size_t row_bytes, std::size_t step_rows);
  ~LoadCounter();
  LoadCounter(const LoadCounter&) = delete;
  LoadCounter& operator=(const LoadCounter&) = delete;

  void on_load(std::uintptr_t address, std::size_t bytes);

  /// Fetches per piece, in address order.
  [[nodiscard]] const std::vector<int>& fetches() const { return fetches_; }

 private:
  std::uintptr_t begin_;
  std::size_t bytes_;
  std::size_t step_bytes_;
  std::size_t current_step_;
  std::uint64_t visit_ = 0;
  std::vector<int> fetches_;
  std::vector<std::uint64_t> last_visit_;
};

}  // namespace kvonce::test
