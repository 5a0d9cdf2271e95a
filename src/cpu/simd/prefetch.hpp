// Brings the rows of a later token step into the L1 cache while the current one is computed.
#pragma once

#include <cstdint>

#include "cpu/simd/unroll.hpp"
#include "shared/token_range.h"

namespace kvonce::cpu {

constexpr std::int64_t kParts = 4;  // of a step, whose lines are asked for side by side

/// Asks for the rows of one later step, spread over the arithmetic of the current step: a few cache lines whenever as many
/// were worked on, because requests in a burst wait for each other's fill buffers. Four neighbouring parts of the step are
/// fetched side by side, a line of each in turn: a part is about a page, each page has a hardware prefetcher of its own, and
/// four of them keep more of the memory busy than one. Ice Lake, two threads, share of a plain read at group 1, bf16 and f32
/// d128: 0.62 0.69 whole rows one after the other, 0.85 0.83 in four parts once per 16 scores, 0.92 0.91 once per cache line.
///
/// Level 2 asks for lines in address order and into L2, for processors whose prefetchers follow requests as they follow loads
/// and whose L1 waits for fewer lines than its L2 does: Zen 4, one thread, group 1, GB/s of f16 and bf16 d128: 12.4 11.4 at level
/// 1, 19.9 19.1 at level 2 (docs/kernel-cpu.md). Short rows with gaps between them are fetched as at level 1 everywhere.
template <class S>
class StepPrefetcher {
 public:
  StepPrefetcher() = default;
  /// Asks for one cache line of every `line_step` while as many rows of `paced_by` bytes are worked on; `level` 1 or 2.
  StepPrefetcher(const void* first_row, std::int64_t stride_bytes, std::int64_t row_bytes, std::int64_t num_rows,
                 std::int64_t paced_by, std::int64_t line_step, std::int64_t level)
      : next_(static_cast<const char*>(first_row)),
        part_stride_(shared::ceil_div(num_rows, kParts) * stride_bytes),
        request_bytes_(kLineBytes * line_step),
        turn_bytes_(request_bytes_),
        requests_per_row_(shared::ceil_div(row_bytes, request_bytes_)),
        piece_requests_(requests_per_row_),
        pieces_left_(shared::ceil_div(num_rows, kParts)) {
    if (stride_bytes == row_bytes) {  // a part is one piece without gaps
      if (level == 2) {               // the four requests of a turn are neighbours
        into_l2_ = true;
        part_stride_ = request_bytes_;
        turn_bytes_ = kParts * request_bytes_;
        piece_requests_ = shared::ceil_div(num_rows * stride_bytes, turn_bytes_);
      } else {
        piece_requests_ = shared::ceil_div(part_stride_, request_bytes_);
      }
      pieces_left_ = 1;
    } else if (level == 2 && row_bytes >= kLongRowBytes) {
      into_l2_ = true;
      part_stride_ = request_bytes_;
      turn_bytes_ = kParts * request_bytes_;
      piece_requests_ = shared::ceil_div(row_bytes, turn_bytes_);
      pieces_left_ = num_rows;
    }
    gap_bytes_ = stride_bytes - piece_requests_ * turn_bytes_;
    requests_left_ = piece_requests_;
    bytes_per_turn_ = kParts * request_bytes_ * paced_by / row_bytes;
  }

  /// For a step of packed rows that is read in kParts parts side by side (attend_in_order.hpp): each part's requests run kLeadBytes
  /// ahead of its reads, from its end on into the same part of the step at `next`, which is read then; null: there is none.
  StepPrefetcher(const char* rows, const char* next, std::int64_t row_bytes, std::int64_t num_rows)
      : next_(next == nullptr ? rows : next), rows_(rows), part_rows_(num_rows / kParts) {
    const std::int64_t lead = kLeadBytes / row_bytes;
    own_rows_ = part_rows_ > lead ? part_rows_ - lead : 0;
    own_bytes_ = own_rows_ * row_bytes;
    lead_bytes_ = part_rows_ * row_bytes - own_bytes_;
  }

  [[nodiscard]] bool asks_by_part() const { return part_rows_ > 0; }
  /// The row at `row`, a part's row `idx`, is being read: asks for the first `bytes` bytes of the one that far ahead, into L2.
  KVONCE_INLINE void advance_part(const void* row, std::int64_t bytes, std::int64_t idx) const {
    const char* const at = static_cast<const char*>(row);
    const char* const ahead = idx < own_rows_ ? at + lead_bytes_ : next_ + (at - rows_ - own_bytes_);
    for (std::int64_t byte = 0; byte < bytes; byte += kLineBytes) S::prefetch_l2(ahead + byte);
  }

  /// So many bytes of the current step were worked on.
  KVONCE_INLINE void advance(std::int64_t bytes) {
    for (due_bytes_ += bytes; due_bytes_ >= bytes_per_turn_; due_bytes_ -= bytes_per_turn_) {
      if (pieces_left_ == 0) return;
      if (into_l2_) {
        for (int part = 0; part < kParts; ++part) S::prefetch_l2(next_ + part * part_stride_);
      } else {
        for (int part = 0; part < kParts; ++part) S::prefetch(next_ + part * part_stride_);
      }
      next_ += turn_bytes_;
      if (--requests_left_ == 0) {
        next_ += gap_bytes_;
        requests_left_ = piece_requests_;
        --pieces_left_;
      }
    }
  }

 private:
  static constexpr std::int64_t kLineBytes = 64;
  static constexpr std::int64_t kLongRowBytes = 512;
  // Zen 4, f32 d128, one thread: 1024 0.90, 3072 0.97, 4096 0.95 of its speed (docs/kernel-cpu.md, "Memory").
  static constexpr std::int64_t kLeadBytes = 2048;

  const char* next_ = nullptr;
  std::int64_t part_stride_ = 0;
  std::int64_t request_bytes_ = 0;
  std::int64_t turn_bytes_ = 0;  // from one turn's first request to the next one's
  std::int64_t requests_per_row_ = 0;
  std::int64_t piece_requests_ = 0;
  std::int64_t pieces_left_ = 0;
  std::int64_t gap_bytes_ = 0;
  std::int64_t requests_left_ = 0;
  std::int64_t due_bytes_ = 0;
  std::int64_t bytes_per_turn_ = INT64_MAX;  // no rows: never due
  bool into_l2_ = false;
  // By part:
  const char* rows_ = nullptr;
  std::int64_t part_rows_ = 0;  // 0: requests are not made by part
  std::int64_t own_rows_ = 0;   // of a part, whose requests stay within it
  std::int64_t own_bytes_ = 0;
  std::int64_t lead_bytes_ = 0;
};

}  // namespace kvonce::cpu
