// The shipped body files and what a launch hands to them, for the file that runs them on the host and those that do on a GPU.
// Included after a dialect.
#pragma once

#include "launch.hpp"
#include "metal/affine.metal.h"
#include "metal/attend.metal.h"
#include "metal/attend_matrix.metal.h"
#include "metal/attend_per_head.metal.h"
#include "metal/merge.metal.h"

namespace kvonce::emulation {
namespace {

using kvonce_metal::bfloat;
using kvonce_metal::half;

template <typename T>
KV_FN kvonce_metal::AttendBuffers<T> buffers_of(const AttendArgs& a) {
  return {static_cast<const T*>(a.q),
          static_cast<const T*>(a.k),
          static_cast<const T*>(a.v),
          a.kv_lens,
          a.kv_starts,
          a.mask,
          a.alibi_slopes,
          a.params,
          a.scalars,
          a.q_strides,
          a.k_strides,
          a.v_strides,
          a.mask_strides,
          a.partial_o,
          a.partial_sums};
}

template <typename T>
KV_FN kvonce_metal::AffineTensor<T> affine_k(const AttendArgs& a) {
  return {static_cast<const unsigned char*>(a.k),
          static_cast<const T*>(a.k_scales),
          static_cast<const T*>(a.k_biases),
          a.k_strides,
          a.k_scales_strides,
          a.k_biases_strides};
}
template <typename T>
KV_FN kvonce_metal::AffineTensor<T> affine_v(const AttendArgs& a) {
  return {static_cast<const unsigned char*>(a.v),
          static_cast<const T*>(a.v_scales),
          static_cast<const T*>(a.v_biases),
          a.v_strides,
          a.v_scales_strides,
          a.v_biases_strides};
}

template <typename T>
constexpr DType kDType = DType::f32;
template <>
constexpr DType kDType<half> = DType::f16;
template <>
constexpr DType kDType<bfloat> = DType::bf16;

}  // namespace
}  // namespace kvonce::emulation
