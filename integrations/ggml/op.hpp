// GGML_OP_FLASH_ATTN_EXT in kvonce's words.
#pragma once

#include <ggml.h>

#include <kvonce/kvonce.hpp>

#include "host.hpp"

namespace kvonce::ggml {

constexpr std::int64_t kMaxQLen = 16;  // more query tokens are prefill, which ggml's kernels do in tiles

/// What the node asks, without pointers: tensors of a graph that is not allocated yet have none. Returns why it cannot be
/// said in kvonce's words, or null. max_kv_len is the node's number of cache cells.
const char* read_problem(const Host& host, const ggml_tensor& node, Problem& problem);

/// How a problem that read_problem() described is cut into chunks.
PlanOptions plan_options(const Problem& problem);

/// ALiBi's slope of each query head as ggml multiplies the mask with it, [num_q_heads]; max_bias > 0.
void fill_slopes(float max_bias, std::int64_t num_q_heads, float* slopes);

float max_bias_of(const ggml_tensor& node);

/// The cells of sequence `seq` outside [begin, end) are hidden from all its rows by the node's mask.
struct Cells {
  std::int32_t begin;
  std::int32_t end;
};
Cells visible_cells(const ggml_tensor& node, std::int64_t seq);

/// The tensors of an allocated node that read_problem() accepted.
Inputs inputs_of(const ggml_tensor& node);
Outputs outputs_of(const ggml_tensor& node);

}  // namespace kvonce::ggml
