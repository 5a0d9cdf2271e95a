// Brings K and V rows closer while an earlier token step is computed.
#pragma once

#include <cstdint>

namespace kvonce::cpu {

/// The rows of a later step, one at a time between the arithmetic of the current one: whole rows in ascending order, because
/// the processor's own prefetcher follows only ascending lines. Each line is asked for twice, early into the L2 cache and
/// later into L1: one request alone would hold a scarce L1 fill buffer for the whole memory latency. The early request names
/// every second line, the processor fetches its neighbour with it.
template <class S>
class RowPrefetcher {
 public:
  RowPrefetcher() = default;
  RowPrefetcher(const void* first_row, std::int64_t stride_bytes, std::int64_t row_bytes, std::int64_t num_rows,
                std::int64_t far_rows)
      : next_(static_cast<const char*>(first_row)),
        stride_bytes_(stride_bytes),
        row_bytes_(row_bytes),
        rows_left_(num_rows),
        far_bytes_(far_rows * stride_bytes) {}

  void fetch_row() {
    if (rows_left_ == 0) return;
    for (std::int64_t byte = 0; byte < row_bytes_; byte += 128) {
      S::prefetch(next_ + byte);
      S::prefetch(next_ + byte + 64);
      S::prefetch_far(next_ + byte + far_bytes_);
    }
    next_ += stride_bytes_;
    --rows_left_;
  }

 private:
  const char* next_ = nullptr;
  std::int64_t stride_bytes_ = 0;
  std::int64_t row_bytes_ = 0;
  std::int64_t rows_left_ = 0;
  std::int64_t far_bytes_ = 0;
};

}  // namespace kvonce::cpu
