// Assembles the table of one target from its SIMD layer. Included only by target translation units.
#pragma once

#include "baselines/per_head_kernel.hpp"
#include "baselines/rate_loops.hpp"
#include "baselines/read_loops.hpp"
#include "baselines/target_kernels.hpp"

namespace kvonce::bench {
namespace {

/// S is a struct of cpu/simd, Bits an integer vector as wide as its registers.
template <class S, class Bits>
constexpr TargetKernels make_target() {
  static_assert(sizeof(Bits) == sizeof(float) * S::width);
  TargetKernels kernels;
  kernels.target = S::kName;
  kernels.vector_floats = S::width;
  kernels.read_loops = make_read_loops<Bits>();
  kernels.per_head = {PerHeadKernel<S, KvFormat::f32>::run, PerHeadKernel<S, KvFormat::f16>::run,
                      PerHeadKernel<S, KvFormat::bf16>::run};
  kernels.merge = merge_parts<S>;
  kernels.qmv = multiply_matrix<S>;
  kernels.madd = {run_madds<S>, kMaddChains * S::width, S::width};
  kernels.exp2 = exp2_array<S>;
  return kernels;
}

}  // namespace
}  // namespace kvonce::bench
