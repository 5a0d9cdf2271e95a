// How an Apple GPU serves a problem: body, row tile, token chunks, threads. A pure function of integers: no Metal, no device.
// python/kvonce/_metal_policy.py is its second form (docs/decisions/0004-metal-policy-in-two-forms.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/plan_data.hpp"

namespace kvonce::metal {

enum class Body : std::int64_t { vector = 1, matrix = 2, per_head = 3 };  // Policy::body

const char* to_string(Body body) noexcept;

/// What the rules need to know of a GPU. Every field is known: capabilities() fills in what the caller left open.
struct Capabilities {
  std::int64_t family = 0;             // Metal's GPU family: 7 (M1) and later, all with simdgroup matrices
  std::int64_t num_cores = 0;          // 0: unknown
  std::int64_t threadgroup_bytes = 0;  // 16384 to 32768
  std::int64_t max_threads = 0;        // of a threadgroup, 32 to 1024
  double read_gbps = 0.0;              // 0: unknown
};

/// What to launch, in the words of metal/params.h.
struct Decision {
  Body body = Body::vector;
  std::string kernel_id;                // attend_metal_<body>_<kv format>_d<qk>x<v>_r<row_tile>
  std::int64_t row_tile = 1;            // the template's kRows
  std::int64_t rows_per_worker = 1;     // row_tile * row_tiles; 1 for per_head
  std::int64_t row_blocks = 1;          // of a KV stream's rows, one threadgroup each
  std::int64_t read_factor = 1;         // row_blocks; the number of rows for per_head
  std::int64_t row_tiles = 1;           // simdgroups side by side over rows
  std::int64_t token_parts = 1;         // simdgroups side by side over tokens
  std::int64_t num_chunks = 1;          // threadgroups that share a KV stream's tokens
  std::int64_t fixed_chunk_tokens = 0;  // 0: even shares of what is visible
  std::int64_t chunk_tokens = 1;        // of a chunk at max_kv_len
  std::int64_t step_tokens = 1;         // between two softmax updates
  std::int64_t threads = 32;            // of an attend threadgroup; never more than Capabilities::max_threads
  std::int64_t threadgroup_bytes = 4;   // of an attend threadgroup; never more than Capabilities::threadgroup_bytes
  std::int64_t merge_simdgroups = 1;
  std::int64_t merge_threadgroup_bytes = 0;
  std::int64_t merge_threadgroups = 0;  // num_seqs * num_q_heads * q_len
  std::int64_t live_floats = 0;         // per lane, an estimate
  std::int64_t slots = 0;               // issue slots per 64 (row, token) pairs, an estimate
  std::int64_t workspace_bytes = 0;     // partial_o and partial_sums
  double predicted_us = 0.0;            // at max_kv_len, by a model: nobody has measured this
  std::vector<std::string> rejected;    // "kernel: reason"
};

/// Throws Error{Unavailable} for a target that is no Apple GPU family from 7 on, Error{InvalidArgument} for other fields.
Capabilities capabilities(const Device& device);

/// `problem` is valid and resolved; q, K and V are of one plain type, or K and V of one of MLX's quantised formats with
/// scales of q's type. Throws Error{InvalidArgument} for a policy that
/// cannot be and Error{Unsupported} for a problem that the kernels do not serve.
Decision choose(const Problem& problem, const Capabilities& gpu, const Policy& asked);

/// The number after "apple", 7 to 99; 0 for another text.
std::int64_t family_of(std::string_view target) noexcept;

}  // namespace kvonce::metal
