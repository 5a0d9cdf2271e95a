// The arms that only stream: the read and the dense matrix-vector product. And what holds the device back.
#include <cuda_fp16.h>

#include <algorithm>

#include "baselines/cuda/kernels.hpp"
#include "baselines/cuda/status.hpp"
#include "baselines/cuda/stream.cuh"
#include "shared/token_range.h"

namespace kvonce::bench::cuda {
namespace {

constexpr int kReadThreads = 512;
constexpr std::uint32_t kUnlikely = 0x9e3779b9U;

// Neighbouring threads of the whole grid load neighbouring words.
template <int kLoads, bool kAhead>
__global__ void __launch_bounds__(kReadThreads)
    read(const uint4* data, std::int64_t count, std::uint32_t* sum, bool keep) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kReadThreads;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kReadThreads + threadIdx.x;
  const std::uint32_t mine = xor_words<kLoads, kAhead>(data, begin, count, stride);
  if (keep || mine == kUnlikely) atomicXor(sum, mine);
}

constexpr int kQmvThreads = 256;
constexpr int kQmvParts = static_cast<int>(kQmvCols) / 256;  // 16-byte words of a row per lane

// A warp per row, the row's 4 KiB in flight at once. x stays in registers: 64 columns per lane.
__global__ void __launch_bounds__(kQmvThreads)
    multiply(const uint4* matrix, std::int64_t num_rows, std::int64_t last_words, const float* x, float* y) {
  constexpr int kRowWords = static_cast<int>(kQmvCols) / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (kQmvThreads / 32);
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kQmvThreads / 32) + threadIdx.x / 32;
  float columns[kQmvParts][8];
#pragma unroll
  for (int part = 0; part < kQmvParts; ++part) {
    const float4* const from = reinterpret_cast<const float4*>(x) + 2 * (part * 32 + lane);
    const float4 low = from[0];
    const float4 high = from[1];
    columns[part][0] = low.x, columns[part][1] = low.y, columns[part][2] = low.z, columns[part][3] = low.w;
    columns[part][4] = high.x, columns[part][5] = high.y, columns[part][6] = high.z, columns[part][7] = high.w;
  }
  for (; row < num_rows; row += num_warps) {
    const std::int64_t words_here = row + 1 < num_rows ? kRowWords : last_words;
    uint4 words[kQmvParts];
#pragma unroll
    for (int part = 0; part < kQmvParts; ++part) {
      const int at = part * 32 + lane;
      words[part] = at < words_here ? load_once(matrix + row * kRowWords + at) : uint4{0, 0, 0, 0};
    }
    float sum = 0.0F;
#pragma unroll
    for (int part = 0; part < kQmvParts; ++part) {
      const std::uint32_t pairs[4] = {words[part].x, words[part].y, words[part].z, words[part].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        sum = fmaf(values.x, columns[part][2 * i], sum);
        sum = fmaf(values.y, columns[part][2 * i + 1], sum);
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, step);
    if (lane == 0) y[row] = sum;
  }
}

__global__ void hold(std::int64_t nanoseconds) {
  std::int64_t begin;
  std::int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

// Elements that the product covers.
std::int64_t qmv_elements(std::int64_t matrix_bytes) { return matrix_bytes / 16 * 8; }

}  // namespace

const std::vector<ReadShape>& read_shapes() {
  static const std::vector<ReadShape> shapes = {{1, 8, true}, {2, 4, true}, {4, 8, false}, {4, 4, false}};
  return shapes;
}

std::string read_kernel_id(const ReadShape& shape) {
  return "read_" + std::to_string(shape.blocks_per_sm) + "x" + std::to_string(kReadThreads) + "x" +
         std::to_string(shape.loads) + (shape.ahead ? "_ahead" : "");
}

void run_read(const ReadShape& shape, const void* data, std::int64_t bytes, std::uint32_t* sum, bool keep, int num_sms,
              cudaStream_t stream) {
  const std::int64_t count = bytes / 16;
  const std::int64_t useful = std::max<std::int64_t>(1, shared::ceil_div(count, std::int64_t{kReadThreads}));
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(useful, shape.blocks_per_sm * num_sms));
  const auto* const words = static_cast<const uint4*>(data);
  auto* const kernel = shape.loads == 8 ? (shape.ahead ? read<8, true> : read<8, false>)
                                        : (shape.ahead ? read<4, true> : read<4, false>);
  kernel<<<blocks, kReadThreads, 0, stream>>>(words, count, sum, keep);
  require_success(cudaGetLastError(), "read");
}

std::int64_t qmv_rows(std::int64_t matrix_bytes) { return shared::ceil_div(qmv_elements(matrix_bytes), kQmvCols); }

std::int64_t qmv_cols(std::int64_t matrix_bytes, std::int64_t row) {
  return std::min(kQmvCols, qmv_elements(matrix_bytes) - row * kQmvCols);
}

void run_qmv(const void* matrix, std::int64_t matrix_bytes, const float* x, float* y, int num_sms,
             cudaStream_t stream) {
  const std::int64_t rows = qmv_rows(matrix_bytes);
  constexpr std::int64_t kRowsPerBlock = kQmvThreads / 32;
  constexpr std::int64_t kBlocksPerSm = 2;
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(shared::ceil_div(rows, kRowsPerBlock), kBlocksPerSm * num_sms));
  multiply<<<blocks, kQmvThreads, 0, stream>>>(static_cast<const uint4*>(matrix), rows,
                                               qmv_cols(matrix_bytes, rows - 1) / 8, x, y);
  require_success(cudaGetLastError(), "qmv");
}

void run_hold(std::int64_t nanoseconds, cudaStream_t stream) {
  hold<<<1, 1, 0, stream>>>(nanoseconds);
  require_success(cudaGetLastError(), "hold");
}

}  // namespace kvonce::bench::cuda
