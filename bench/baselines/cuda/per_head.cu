// What: attention of every query row by itself, with the work split of MLX's two-pass vector kernel. The heads of a group
//   fetch the same K and V group_size times, from L2 at best. The baseline of every comparison.
// Shapes: q [head_dim], K and V [tokens, head_dim], o [head_dim], head_dim 64, 96, 128 or 256; f32, f16 or bf16.
// Work split: 32 blocks per row, 8 warps per block, one token per warp; lane l holds dims [l, l + 1) * head_dim / 32:
//
//     tokens  | 0 1 2 .. 7 | 8 9 .. 15 | ... | 248 .. 255 | 256 .. |
//     block         0            1       ...       31          0
//
// Steps:
//   [1] q as f32, multiplied by scale * log2(e)
//   [2] per token: dot product across the warp, running maximum, rescaled sum and output in float32
//   [3] the block's warps join through shared memory; partial output, maximum and sum go to the workspace
//   [4] second kernel, one block per row: joins the 32 partials, normalises, stores
// Bytes: num_q_heads * q_len * kv_len * 2 * head_dim * element size.
// Beyond MLX's kernel a lane loads its part of a row with one instruction (two for 32-byte parts), V before it is needed:
// the measured difference is the order of reads, not the width of the loads.
// Not handled here: windows, masks, sinks, softcap, quantised caches, kv_lens.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "baselines/cuda/kernels.hpp"
#include "baselines/cuda/status.hpp"
#include "shared/partial.h"

namespace kvonce::bench::cuda {
namespace {

constexpr int kBlocks = 32;  // per row; the second kernel has a warp for each
constexpr int kWarps = 8;
constexpr float kLowest = -3.402823466e38F;
constexpr unsigned kAllLanes = 0xffffffffU;

struct Tensor {
  const void* data;
  std::int64_t seq;  // strides in elements
  std::int64_t head;
  std::int64_t token;
};

struct PerHeadParams {
  Tensor q;
  Tensor k;
  Tensor v;
  void* out;           // [num_seqs, num_q_heads, q_len, head_dim]
  float* partial_o;    // [num_seqs, num_q_heads, q_len, kBlocks, head_dim]
  float2* partial_ml;  // [num_seqs, num_q_heads, q_len, kBlocks]: maximum (log2) and sum
  float scale_log2;
  int kv_len;
  int group_size;
  bool causal;
  DType out_type;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// A lane's part of a row, loaded with the widest instructions that its size allows.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount >= 16      ? 16
               : sizeof(T) * kCount % 8 == 0 ? 8
                                             : 4) Part {
  T values[kCount];
};
template <typename T>
struct alignas(sizeof(T)) Part<T, 3> {  // head_dim 96
  T values[3];
};

template <typename T, int kCount>
__device__ __forceinline__ void load_part(const T* row, int lane, float (&values)[kCount]) {
  const Part<T, kCount> part = *reinterpret_cast<const Part<T, kCount>*>(row + lane * kCount);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = to_float(part.values[i]);
}

__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ __forceinline__ float max_lanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// [num_q_heads, q_len, num_seqs] of rows in the grid's x, y and z.
__device__ __forceinline__ std::int64_t row_of(int head, int query, int seq) {
  return (static_cast<std::int64_t>(seq) * gridDim.x + head) * gridDim.y + query;
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kWarps * 32) attend_rows(const __grid_constant__ PerHeadParams p) {
  constexpr int kCount = kDim / 32;
  __shared__ float outputs[kWarps][kDim];
  __shared__ float2 all_ml[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int head = static_cast<int>(blockIdx.x);
  const int query = static_cast<int>(blockIdx.y);
  const int seq = static_cast<int>(blockIdx.z) / kBlocks;
  const int block = static_cast<int>(blockIdx.z) % kBlocks;
  const int kv_head = head / p.group_size;
  const T* const k = static_cast<const T*>(p.k.data) + seq * p.k.seq + kv_head * p.k.head;
  const T* const v = static_cast<const T*>(p.v.data) + seq * p.v.seq + kv_head * p.v.head;

  // [1]
  float q[kCount];
  load_part(static_cast<const T*>(p.q.data) + seq * p.q.seq + head * p.q.head + query * p.q.token, lane, q);
#pragma unroll
  for (int i = 0; i < kCount; ++i) q[i] *= p.scale_log2;

  // [2]
  const int end = p.causal ? p.kv_len - static_cast<int>(gridDim.y) + 1 + query : p.kv_len;
  float m = kLowest;
  float l = 0.0F;
  float o[kCount] = {};
  for (int token = block * kWarps + warp; token < end; token += kBlocks * kWarps) {
    float key[kCount];
    float value[kCount];
    load_part(k + token * p.k.token, lane, key);
    load_part(v + token * p.v.token, lane, value);
    float score = 0.0F;
#pragma unroll
    for (int i = 0; i < kCount; ++i) score = fmaf(q[i], key[i], score);
    score = sum_lanes(score);
    const float high = fmaxf(m, score);
    const float factor = exp2f(m - high);
    const float prob = exp2f(score - high);
    m = high;
    l = l * factor + prob;
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] = o[i] * factor + prob * value[i];
  }

  // [3]
#pragma unroll
  for (int i = 0; i < kCount; ++i) outputs[warp][lane * kCount + i] = o[i];
  if (lane == 0) all_ml[warp] = make_float2(m, l);
  __syncthreads();
  const std::int64_t row = row_of(head, query, seq);
  float high = kLowest;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) high = fmaxf(high, all_ml[w].x);
  float sum = 0.0F;
  float factors[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    factors[w] = exp2f(all_ml[w].x - high);
    sum += all_ml[w].y * factors[w];
  }
  for (int d = static_cast<int>(threadIdx.x); d < kDim; d += kWarps * 32) {
    float joined = 0.0F;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) joined = fmaf(outputs[w][d], factors[w], joined);
    p.partial_o[(row * kBlocks + block) * kDim + d] = joined;
  }
  if (threadIdx.x == 0) p.partial_ml[row * kBlocks + block] = make_float2(high, sum);
}

__device__ __forceinline__ void store(void* out, DType type, std::int64_t at, float x) {
  if (type == DType::f32) static_cast<float*>(out)[at] = x;
  if (type == DType::f16) static_cast<__half*>(out)[at] = __float2half_rn(x);
  if (type == DType::bf16) static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(x);
}

// [4] Warp w loads the partial of block w; after the transposition it sums one dim over the blocks.
template <int kDim>
__global__ void __launch_bounds__(kBlocks * 32) join_blocks(const __grid_constant__ PerHeadParams p) {
  __shared__ float parts[kBlocks][33];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t row =
      row_of(static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z));
  const float2 ml = p.partial_ml[row * kBlocks + lane];
  const float high = max_lanes(ml.x);
  const float factor = exp2f(ml.x - high);  // of block `lane`
  const float sum = sum_lanes(ml.y * factor);
  const float scale = sum == 0.0F ? 0.0F : 1.0F / sum;
  const float* const from = p.partial_o + (row * kBlocks + warp) * kDim;
  float parts_of_block[kDim / 32];
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) parts_of_block[i] = from[i * 32 + lane];
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    parts[warp][lane] = parts_of_block[i];
    __syncthreads();
    const float joined = sum_lanes(parts[lane][warp] * factor);
    if (lane == 0) store(p.out, p.out_type, row * kDim + i * 32 + warp, joined * scale);
    __syncthreads();
  }
}

template <typename T, int kDim>
void launch(const PerHeadParams& p, dim3 rows, cudaStream_t stream) {
  attend_rows<T, kDim><<<dim3(rows.x, rows.y, rows.z * kBlocks), kWarps * 32, 0, stream>>>(p);
  require_success(cudaGetLastError(), "per_head, first pass");
  join_blocks<kDim><<<rows, kBlocks * 32, 0, stream>>>(p);
  require_success(cudaGetLastError(), "per_head, second pass");
}

template <typename T>
void launch(std::int64_t dim, const PerHeadParams& p, dim3 rows, cudaStream_t stream) {
  if (dim == 64) launch<T, 64>(p, rows, stream);
  if (dim == 96) launch<T, 96>(p, rows, stream);
  if (dim == 128) launch<T, 128>(p, rows, stream);
  if (dim == 256) launch<T, 256>(p, rows, stream);
}

Tensor tensor(const TensorView& view) { return {view.data, view.seq_stride, view.head_stride, view.token_stride}; }

constexpr std::int64_t kMaxGridYz = 65535;

}  // namespace

PerHead::PerHead(const Problem& problem) : problem_(problem) {
  const Problem& p = problem;
  const std::int64_t dim = p.head_dim_qk;
  const bool plain = p.k_format == p.v_format && p.k_format <= KvFormat::bf16 &&
                     static_cast<int>(p.q_dtype) == static_cast<int>(p.k_format) && p.layout == KvLayout::strided &&
                     p.window == 0 && p.mask == MaskKind::none && p.softcap == 0.0F && !p.has_sinks && !p.has_alibi &&
                     !p.has_segments;
  const bool served = (dim == 64 || dim == 96 || dim == 128 || dim == 256) && p.dim_v() == dim &&
                      p.q_len <= kMaxGridYz && p.num_seqs * kBlocks <= kMaxGridYz;
  if (!plain || !served) {
    throw Error(
        ErrorCode::Unsupported,
        "arm per_head: serves strided caches with q, K and V all f32, f16 or bf16, head dims 64, 96, 128 and 256, "
        "up to 2047 sequences, without window, mask, softcap, sinks, ALiBi and segments; leave it out with --arms "
        "kvonce,read");
  }
}

std::size_t PerHead::workspace_bytes() const {
  const std::int64_t rows = problem_.num_seqs * problem_.num_q_heads * problem_.q_len;
  return static_cast<std::size_t>(rows * kBlocks * (problem_.dim_v() * 4 + 8));
}

std::string PerHead::kernel_id() const {
  return "per_head_cuda_" + std::string(to_string(problem_.k_format)) + "_d" + std::to_string(problem_.head_dim_qk);
}

void PerHead::run(const Inputs& inputs, void* out, void* workspace, cudaStream_t stream) const {
  const std::int64_t num_rows = problem_.num_seqs * problem_.num_q_heads * problem_.q_len;
  const float scale = problem_.scale.value_or(1.0F / std::sqrt(static_cast<float>(problem_.head_dim_qk)));
  PerHeadParams p{};
  p.q = tensor(inputs.q);
  p.k = tensor(inputs.k);
  p.v = tensor(inputs.v);
  p.out = out;
  p.partial_o = static_cast<float*>(workspace);
  p.partial_ml = reinterpret_cast<float2*>(p.partial_o + num_rows * kBlocks * problem_.dim_v());
  p.scale_log2 = scale * shared::kLog2e;
  p.kv_len = static_cast<int>(problem_.max_kv_len);
  p.group_size = static_cast<int>(problem_.group_size());
  p.causal = problem_.causal;
  p.out_type = problem_.out_dtype;
  const dim3 rows(static_cast<unsigned>(problem_.num_q_heads), static_cast<unsigned>(problem_.q_len),
                  static_cast<unsigned>(problem_.num_seqs));
  if (problem_.k_format == KvFormat::f32) launch<float>(problem_.head_dim_qk, p, rows, stream);
  if (problem_.k_format == KvFormat::f16) launch<__half>(problem_.head_dim_qk, p, rows, stream);
  if (problem_.k_format == KvFormat::bf16) launch<__nv_bfloat16>(problem_.head_dim_qk, p, rows, stream);
}

}  // namespace kvonce::bench::cuda
