#include <string>

#include "core/refuse.hpp"
#include "kvonce/attend.hpp"
#include "shared/partial.h"

namespace kvonce {
namespace {

constexpr std::int64_t kDimBlock = 64;

void require_at_least(const char* name, std::int64_t value, std::int64_t low) {
  if (value < low) core::refuse(ErrorCode::InvalidArgument, name, std::to_string(value), ">= " + std::to_string(low));
}

}  // namespace

void merge(const MergeInputs& in, float* out, std::int64_t out_row_stride, float* lse) {
  require_at_least("num_parts", in.num_parts, 1);
  require_at_least("num_rows", in.num_rows, 0);
  require_at_least("head_dim_v", in.head_dim_v, 1);
  if (in.num_rows == 0) return;
  if (in.o == nullptr || in.lse == nullptr || out == nullptr) {
    core::refuse(ErrorCode::InvalidArgument,
                 in.o == nullptr     ? "o"
                 : in.lse == nullptr ? "lse"
                                     : "out",
                 "null", "a pointer");
  }
  for (std::int64_t row = 0; row < in.num_rows; ++row) {
    const float* row_lse = in.lse + row * in.lse_row_stride;
    float max_lse = -INFINITY;
    for (std::int64_t part = 0; part < in.num_parts; ++part) {
      const float part_lse = row_lse[part * in.lse_part_stride];
      max_lse = part_lse > max_lse ? part_lse : max_lse;
    }
    const float shift = shared::merge_shift(max_lse);
    float sum = 0.0F;
    for (std::int64_t part = 0; part < in.num_parts; ++part) {
      sum += std::exp(row_lse[part * in.lse_part_stride] - shift);
    }
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
    float* out_row = out + row * out_row_stride;
    // Dims in blocks, so that every part of a block is read before the block is written: out may be one of the parts.
    for (std::int64_t begin = 0; begin < in.head_dim_v; begin += kDimBlock) {
      const std::int64_t count = in.head_dim_v - begin < kDimBlock ? in.head_dim_v - begin : kDimBlock;
      float block[kDimBlock] = {};
      for (std::int64_t part = 0; part < in.num_parts; ++part) {
        const float weight = std::exp(row_lse[part * in.lse_part_stride] - shift) * inverse;
        if (weight == 0.0F) continue;  // a part without keys is neutral whatever its o holds
        const float* o = in.o + part * in.o_part_stride + row * in.o_row_stride + begin;
        for (std::int64_t dim = 0; dim < count; ++dim) block[dim] += weight * o[dim];
      }
      for (std::int64_t dim = 0; dim < count; ++dim) out_row[begin + dim] = block[dim];
    }
    if (lse != nullptr) lse[row] = shared::merged_lse(shift, sum);
  }
}

}  // namespace kvonce
