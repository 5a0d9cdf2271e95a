// The MLX formats' scales and biases: a token step of them at a time becomes float32, so that kernels depend neither on their
// dtype nor on how they lie in memory. The codes become values inside the kernels, by one multiply-add with the group's scale
// and bias. Scaling the sums of a group instead (scale * (q.codes) + bias * sum(q)) saves one instruction in nine with one row
// and none with more, and cancels: codes are positive, so that both terms are many times their sum.
#pragma once

#include <cstdint>

#include "cpu/attend.hpp"
#include "cpu/load.hpp"
#include "cpu/task.hpp"
#include "shared/token_range.h"

namespace kvonce::cpu {

/// K or V of one KV stream with the scales and biases of the current token step.
template <class S>
class AffineStep {
 public:
  AffineStep() = default;
  /// `floats`: affine_step_floats() of them.
  AffineStep(const void* codes, std::int64_t token_stride, const SideRows& scales, const SideRows& biases,
             const ChunkTask& task, std::int64_t groups, float* floats)
      : codes_(static_cast<const std::uint8_t*>(codes)),
        token_stride_(token_stride),
        scales_(scales),
        biases_(biases),
        dtype_(task.scales_dtype),
        kv_len_(task.kv_len),
        groups_(groups),
        group_log2_(task.quant_group == 32   ? 5
                    : task.quant_group == 64 ? 6
                                             : 7),
        floats_(floats),
        bias_floats_(floats + affine_step_floats(groups, task.step_tokens) / 2) {}

  /// Once per step, before the row() of any of its tokens. Does nothing for other formats.
  void load(const shared::TokenRange& tokens) {
    if (groups_ == 0) return;
    first_token_ = tokens.begin;
    with_dtype(dtype_, [&](auto format) {
      convert<decltype(format)::value>(scales_, tokens, floats_);
      convert<decltype(format)::value>(biases_, tokens, bias_floats_);
    });
  }

  /// What a kernel takes for the rows from `token` of the loaded step on; valid until the next call.
  [[nodiscard]] const void* row(std::int64_t token) {
    const std::int64_t first = (token - first_token_) * groups_;
    row_ = {codes_ + token * token_stride_, floats_ + first, bias_floats_ + first, groups_, group_log2_};
    return &row_;
  }

 private:
  template <KvFormat format>
  void convert(const SideRows& side, const shared::TokenRange& tokens, float* out) const {
    using Stored = typename S::template Elements<format>::Stored;
    const auto* first = static_cast<const Stored*>(side.data) + tokens.begin * side.token_stride;
    const std::int64_t count = tokens.end - tokens.begin;
    if (side.token_stride == groups_) {
      convert_row<format>(first, count * groups_, out);
      const std::int64_t next = kv_len_ - tokens.end < count ? kv_len_ - tokens.end : count;
      const auto* ahead = reinterpret_cast<const char*>(first + count * groups_);
      const std::int64_t bytes = next * groups_ * std::int64_t{sizeof(Stored)};
      for (std::int64_t at = 0; at < bytes; at += 64) S::prefetch(ahead + at);
      return;
    }
    for (std::int64_t t = 0; t < count; ++t)
      convert_row<format>(first + t * side.token_stride, groups_, out + t * groups_);
  }

  /// Writes whole vectors, reads no more than `count` values.
  template <KvFormat format, class Stored>
  static void convert_row(const Stored* row, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count; i += S::width) S::store(out + i, load_upto<S, format>(row + i, count - i));
  }

  const std::uint8_t* codes_ = nullptr;
  std::int64_t token_stride_ = 0;
  SideRows scales_{};
  SideRows biases_{};
  DType dtype_ = DType::f32;
  std::int64_t kv_len_ = 0;
  std::int64_t groups_ = 0;
  int group_log2_ = 0;
  std::int64_t first_token_ = 0;
  float* floats_ = nullptr;
  float* bias_floats_ = nullptr;
  AffineRow row_{};
};

}  // namespace kvonce::cpu
