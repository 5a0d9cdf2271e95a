// The instructions that C++ has no name for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvonce::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr unsigned kAllLanes = 0xffffffffU;

/// K and V are read once: past L1, with the whole 128-byte line on its way into L2. Words: uint4, uint2 or std::uint32_t.
template <typename Words>
__device__ __forceinline__ Words load_stream(const void* address) {
  Words v;
  if constexpr (sizeof(Words) == 16) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
  } else if constexpr (sizeof(Words) == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(address));
  }
  return v;
}

/// q may have been written by the preceding kernel while this one already ran: not through the read-only path.
__device__ __forceinline__ uint4 load_late(const void* address) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_late_8(const void* address) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address) : "memory");
  return v;
}

/// c += a * b: a 16 x 16 (row major), b 16 x 8, c 16 x 8 in float32. Fragments as in the PTX manual, mma.m16n8k16.
__device__ __forceinline__ void mma(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                    std::uint32_t a3, std::uint32_t b0, std::uint32_t b1, bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                    std::uint32_t a3, std::uint32_t b0, std::uint32_t b1, f16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Transposes an 8 x 8 matrix of 16-bit values that is spread over the warp, a row per four lanes.
__device__ __forceinline__ std::uint32_t transpose_8x8(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ std::uint32_t pack(float low, float high, bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ std::uint32_t pack(float low, float high, f16) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ __forceinline__ float2 unpack(std::uint32_t pair, bf16) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U));
}
__device__ __forceinline__ float2 unpack(std::uint32_t pair, f16) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <typename T>
__device__ __forceinline__ float round_to(float x, T) {
  return unpack(pack(x, x, T()), T()).x;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The largest x of a warp; no x is NaN.
__device__ __forceinline__ float max_of_warp(float x) {
  const int bits = __float_as_int(x);
  const int most = __reduce_max_sync(kAllLanes, bits ^ ((bits >> 31) & 0x7fffffff));
  return __int_as_float(most ^ ((most >> 31) & 0x7fffffff));
}

/// Barriers of the block beside __syncthreads(): some threads wait until all have arrived, in whole warps.
__device__ __forceinline__ void arrive_at_block_barrier(int number, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void wait_at_block_barrier(int number, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Words of the workspace: each is its own flag, so neither side needs a fence.
__device__ __forceinline__ float4 load_words(const float4* address) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_words(const float2* address) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_words(float4* address, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_words(float2* address, float2 v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(v.x), "f"(v.y) : "memory");
}

// A stream's word of tickets.
__device__ __forceinline__ std::uint64_t load_word(const std::uint64_t* address) {
  std::uint64_t v = 0;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_word(std::uint64_t* address, std::uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}
/// Replaces `expected` by `wanted`; returns what was there.
__device__ __forceinline__ std::uint64_t swap_word(std::uint64_t* address, std::uint64_t expected,
                                                   std::uint64_t wanted) {
  std::uint64_t found = 0;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(found)
               : "l"(address), "l"(expected), "l"(wanted)
               : "memory");
  return found;
}
__device__ __forceinline__ std::uint64_t global_nanoseconds() {
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Thread block clusters, bulk copies and programmatic dependent launch exist from sm_90 on. Elsewhere no plan uses the first
// two, and the launch functions are what they are in a launch without dependents: nothing.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}
/// The address of another block's copy of a shared variable.
__device__ __forceinline__ std::uint32_t cluster_address(std::uint32_t shared, unsigned block) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(block));
  return address;
}

// Stores into another block's shared memory. They count in that block's barrier, which opens when all its bytes are there.
__device__ __forceinline__ void expect_bytes(std::uint64_t* barrier, unsigned bytes) {
  const std::uint32_t at = shared_address(barrier);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void post(std::uint32_t address, float4 v, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void post(std::uint32_t address, float2 v, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(v.x), "f"(v.y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void wait_for_bytes(std::uint64_t* barrier, unsigned parity = 0) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again%=:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again%=;\n\t"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Copies into this block's shared memory that count in a barrier, one phase after the other: open, then expect_more_bytes
// for each phase. Addresses and sizes are multiples of 16 bytes.
__device__ __forceinline__ void open_barrier(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_more_bytes(std::uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
template <int kBytes>
__device__ __forceinline__ void copy_bytes(void* to, const void* from, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "n"(kBytes), "r"(shared_address(barrier))
               : "memory");
}

#else
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ std::uint32_t shared_address(const void*) { return 0; }
__device__ __forceinline__ std::uint32_t cluster_address(std::uint32_t, unsigned) { return 0; }
__device__ __forceinline__ void expect_bytes(std::uint64_t*, unsigned) {}
__device__ __forceinline__ void post(std::uint32_t, float4, std::uint32_t) {}
__device__ __forceinline__ void post(std::uint32_t, float2, std::uint32_t) {}
__device__ __forceinline__ void wait_for_bytes(std::uint64_t*, unsigned = 0) {}
__device__ __forceinline__ void open_barrier(std::uint64_t*) {}
__device__ __forceinline__ void expect_more_bytes(std::uint64_t*, unsigned) {}
template <int kBytes>
__device__ __forceinline__ void copy_bytes(void*, const void*, std::uint64_t*) {}
#endif

}  // namespace kvonce::cuda
