// Which of the step functions a row tile runs: by its rows, the formats of K and V and what the plan chose.
#pragma once

#include <cstdint>

#include "cpu/attend.hpp"
#include "cpu/attend_dot.hpp"
#include "cpu/attend_in_order.hpp"
#include "cpu/attend_split.hpp"
#include "cpu/attend_values.hpp"
#include "cpu/task.hpp"

namespace kvonce::cpu {

/// The step functions of one row tile size, chosen by K and V format at run time.
template <class S>
struct TileKernels {
  void (*load_row_tile)(const ChunkTask&, std::int64_t, int, float*);
  void (*score_tokens)(const void*, std::int64_t, std::int64_t, const float*, std::int64_t, float, StepPrefetcher<S>&,
                       float*);
  void (*update_softmax)(float*, std::int64_t, float*, float*, float*, std::int64_t);
  void (*accumulate_values)(const void*, std::int64_t, std::int64_t, const float*, std::int64_t, std::int64_t,
                            StepPrefetcher<S>&, float*, std::int64_t);
};

template <class S, int rows, KvFormat format>
void set_score_kernels(const ChunkTask& task, TileKernels<S>& kernels) {
  if constexpr (S::kHasSplit && lane_rows(rows) == 8 && (S::kSplitsBlocks || !is_block(format))) {
    // Rows stored twice have to leave K room in L1. Float32 does not gain: 8 rows of d64 1.05x, d128 1.00x, d256 0.93x.
    constexpr bool kTwice = S::kSplitsTwice && format != KvFormat::f32;
    kernels.load_row_tile = load_row_tile_split<S, format, kTwice>;
    kernels.score_tokens = score_tokens_split<S, format, rows, kTwice>;
    if constexpr (kTwice && !is_block(format)) {
      if (task.head_dim_qk > kMostDimsTwice) {
        kernels.load_row_tile = load_row_tile_split<S, format, false>;
        kernels.score_tokens = score_tokens_split<S, format, rows, false>;
      }
    }
  } else {
    // Formats of one order of dims share it.
    constexpr KvFormat kOrder = S::template Elements<format>::kEvenOdd ? KvFormat::bf16 : KvFormat::f32;
    kernels.load_row_tile = load_row_tile<S, kOrder>;
    kernels.score_tokens = score_tokens<S, format, rows>;
  }
  if constexpr (rows == 1) {
    if (task.prefetch_level == 2) kernels.score_tokens = score_tokens_in_order<S, format>;
  }
  if constexpr (S::kHasPairDot && format == KvFormat::bf16) {
    if (task.pair_dot) {
      kernels.load_row_tile = load_row_tile_dot<S>;
      kernels.score_tokens = score_tokens_dot<S, rows>;
    }
  }
}

template <class S, int rows>
TileKernels<S> kernels_of_tile(const ChunkTask& task) {
  TileKernels<S> kernels{};
  kernels.update_softmax = update_softmax<S, rows>;
#define KVONCE_FORMAT(name)                                                                       \
  if (task.k_format == KvFormat::name) set_score_kernels<S, rows, KvFormat::name>(task, kernels); \
  if (task.v_format == KvFormat::name) kernels.accumulate_values = accumulate_values<S, KvFormat::name, rows>;
#define KVONCE_BLOCK_FORMAT(name) KVONCE_FORMAT(name)
#define KVONCE_AFFINE_FORMAT(name) KVONCE_FORMAT(name)
#include "shared/instances.def"
  if constexpr (S::kHasPairDot) {
    if (task.pair_dot_values) kernels.accumulate_values = accumulate_values_dot<S, rows>;
  }
  return kernels;
}

template <class S>
TileKernels<S> find_kernels(int rows, const ChunkTask& task) {
#define KVONCE_ROW_TILE(count)                                 \
  if constexpr (count <= S::kMaxRowTile) {                     \
    if (rows == count) return kernels_of_tile<S, count>(task); \
  }
#include "shared/instances.def"
  return {};
}

}  // namespace kvonce::cpu
