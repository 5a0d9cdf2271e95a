// What: the least that a launch of kvonce's shape can take. The blocks stream the bytes of K and V, no arithmetic but an
//   xor; then the blocks of a stream join partials of the size that attention has, by addition.
// Work split: `splits` blocks per stream, each a contiguous share of its bytes. 256 threads, as many as kvonce's blocks have,
//   or 512: whichever is faster for a case.
// The join, as in src/cuda/merge.cuh:
//   cluster: the blocks of a stream read each other's partials from distributed shared memory, a slice of the output each
//   else:    partials go to the workspace; the `join_blocks` blocks that finished last wait for each other and join a slice
//            each. Tickets count on from call to call, `splits` per call, so nothing is reset.
// Waiting cannot block: a block takes its ticket when it has finished, so at most join_blocks - 1 per stream wait, which
//   FloorShape keeps below the number of multiprocessors: every other block finds a place.
// Check: every word of a block's partials is in [1, 2), so every word of out is in [splits, 2 * splits).
#include <cooperative_groups.h>

#include <algorithm>

#include "baselines/cuda/kernels.hpp"
#include "baselines/cuda/status.hpp"
#include "baselines/cuda/stream.cuh"
#include "shared/token_range.h"

namespace kvonce::bench::cuda {
namespace {

constexpr int kLoads = 8;
constexpr int kTicketStride = 32;  // words: a cache line per stream

struct FloorParams {
  const uint4* data;  // [num_streams, stream_vectors]
  float4* out;        // [num_streams, elements]
  float4* partials;   // [num_streams, splits, elements]
  unsigned* tickets;  // [num_streams, kTicketStride]
  std::int64_t stream_vectors;
  int splits;
  int join_blocks;
  int elements;
};

__device__ __forceinline__ void add(float4& a, const float4& b) {
  a.x += b.x;
  a.y += b.y;
  a.z += b.z;
  a.w += b.w;
}

/// This thread's word of the block's partials, 1 to 2, out of all that it loaded.
template <int kThreads>
__device__ __forceinline__ float stream_share(const FloorParams& p, int stream, int split) {
  const std::int64_t share = (p.stream_vectors + p.splits - 1) / p.splits;
  const std::int64_t begin = share * split;
  const std::int64_t end = min(begin + share, p.stream_vectors);
  const std::uint32_t word =
      xor_words<kLoads, true>(p.data + stream * p.stream_vectors, begin + threadIdx.x, end, kThreads);
  return __uint_as_float(0x3f800000U | (word & 0x7fffffU));
}

/// out = the sum over the splits of fetch(split, element), for elements [begin, end). The splits of an element are shared by
/// the threads of a column, which then add up through shared memory.
template <int kThreads, class Fetch>
__device__ __forceinline__ void join_slice(const FloorParams& p, int begin, int end, float4* out, const Fetch& fetch) {
  __shared__ float4 sums[kThreads];
  int width = 1;
  while (width < min(end - begin, kThreads)) width *= 2;
  const int group = static_cast<int>(threadIdx.x) / width;
  const int groups = kThreads / width;
  for (int from = begin; from < end; from += width) {
    const int e = from + static_cast<int>(threadIdx.x) % width;
    float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
    if (e < end) {
#pragma unroll 4
      for (int s = group; s < p.splits; s += groups) add(sum, fetch(s, e));
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0 && e < end) {
      for (int g = 1; g < groups; ++g) add(sum, sums[g * width + threadIdx.x]);
      out[e] = sum;
    }
    __syncthreads();
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1) floor_workspace(const __grid_constant__ FloorParams p) {
  const int stream = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.x);
  const float mine = stream_share<kThreads>(p, stream, split);
  float4* const partials = p.partials + static_cast<std::int64_t>(stream) * p.splits * p.elements;
  for (int e = static_cast<int>(threadIdx.x); e < p.elements; e += kThreads) {
    __stcg(partials + static_cast<std::int64_t>(split) * p.elements + e, make_float4(mine, mine, mine, mine));
  }
  __shared__ unsigned shared_ticket;
  __threadfence();
  __syncthreads();
  const auto splits = static_cast<unsigned>(p.splits);
  unsigned* const tickets = p.tickets + stream * kTicketStride;
  if (threadIdx.x == 0) shared_ticket = atomicAdd(tickets, 1U);
  __syncthreads();
  const unsigned place = shared_ticket % splits;
  const auto joiners = static_cast<unsigned>(p.join_blocks);
  if (place < splits - joiners) return;
  if (threadIdx.x == 0) {
    const unsigned all = shared_ticket - place + splits;
    while (static_cast<int>(*static_cast<volatile unsigned*>(tickets) - all) < 0) {
    }
    __threadfence();
  }
  __syncthreads();
  const int slice = (p.elements + p.join_blocks - 1) / p.join_blocks;
  const int begin = slice * static_cast<int>(place - (splits - joiners));
  const int end = min(begin + slice, p.elements);
  join_slice<kThreads>(p, begin, end, p.out + static_cast<std::int64_t>(stream) * p.elements,
                       [&](int s, int e) { return __ldcg(partials + static_cast<std::int64_t>(s) * p.elements + e); });
}

extern __shared__ float4 cluster_partial[];  // [elements]

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1) floor_cluster(const __grid_constant__ FloorParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto cluster = cooperative_groups::this_cluster();
  const int stream = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.x);
  const float mine = stream_share<kThreads>(p, stream, split);
  for (int e = static_cast<int>(threadIdx.x); e < p.elements; e += kThreads) {
    cluster_partial[e] = make_float4(mine, mine, mine, mine);
  }
  cluster.sync();
  const int slice = (p.elements + p.splits - 1) / p.splits;
  const int begin = slice * split;
  const int end = min(begin + slice, p.elements);
  join_slice<kThreads>(p, begin, end, p.out + static_cast<std::int64_t>(stream) * p.elements, [&](int s, int e) {
    return *cluster.map_shared_rank(cluster_partial + e, static_cast<unsigned>(s));
  });
  cluster.sync();  // nobody leaves while its partials are read
#endif
}

std::int64_t ticket_bytes(const FloorShape& shape) { return shape.num_streams * kTicketStride * 4; }

template <int kThreads>
void launch(const FloorParams& p, bool cluster, cudaLaunchConfig_t config) {
  config.blockDim = dim3(kThreads);
  if (!cluster) {
    require_success(cudaLaunchKernelEx(&config, floor_workspace<kThreads>, p), "floor");
    return;
  }
  config.dynamicSmemBytes = static_cast<std::size_t>(p.elements) * sizeof(float4);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {config.gridDim.x, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  auto* const kernel = floor_cluster<kThreads>;
  require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(config.dynamicSmemBytes)),
                  "floor, shared memory");
  require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                  "floor, cluster size");
  require_success(cudaLaunchKernelEx(&config, kernel, p), "floor");
}

}  // namespace

std::string floor_kernel_id(const FloorShape& shape) {
  return std::string("floor_") + (shape.cluster ? "c" : "s") +
         std::to_string(shape.cluster ? shape.splits : shape.join_blocks) + "_" +
         std::to_string(shape.splits * shape.num_streams) + "x" + std::to_string(shape.threads);
}

std::size_t floor_workspace_bytes(const FloorShape& shape) {
  return static_cast<std::size_t>(ticket_bytes(shape) + shape.num_streams * shape.splits * shape.elements * 16);
}

void run_floor(const FloorShape& shape, const void* data, void* out, void* workspace, cudaStream_t stream) {
  FloorParams p{};
  p.data = static_cast<const uint4*>(data);
  p.out = static_cast<float4*>(out);
  p.tickets = static_cast<unsigned*>(workspace);
  p.partials = reinterpret_cast<float4*>(static_cast<char*>(workspace) + ticket_bytes(shape));
  p.stream_vectors = shape.stream_vectors;
  p.splits = static_cast<int>(shape.splits);
  p.elements = static_cast<int>(shape.elements);
  p.join_blocks = static_cast<int>(std::min({shape.join_blocks, shape.splits, shape.elements}));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.splits), static_cast<unsigned>(shape.num_streams));
  config.stream = stream;
  if (shape.threads == 512) {
    launch<512>(p, shape.cluster, config);
  } else {
    launch<256>(p, shape.cluster, config);
  }
}

}  // namespace kvonce::bench::cuda
