// wgmma: products of four warps at once, 64 rows each, with the operands in shared memory. sm_90a only; elsewhere no plan uses
// it.
//
// An operand in shared memory stands as tiles of 64 elements (128 bytes) by any number of rows, the 16-byte pieces of row r at
// piece ^ (r % 8), tiles at multiples of 1024 bytes: matrix_piece().
#pragma once

#include <cstdint>

#include "cuda/ptx.cuh"

namespace kvonce::cuda {

/// Where piece `piece` (16 bytes) of row `row` stands, in bytes, of a matrix with `rows` rows.
__device__ __forceinline__ unsigned matrix_piece(unsigned rows, unsigned row, unsigned piece) {
  return piece / 8 * rows * 128 + row * 128 + ((piece ^ row) % 8) * 16;
}

/// Describes an operand to the tensor cores: eight rows are 1024 bytes, the next 64 elements tile_bytes further.
__device__ __forceinline__ std::uint64_t matrix_at(std::uint32_t shared, unsigned tile_bytes) {
  constexpr std::uint64_t kSwizzle128 = 1ULL << 62;
  constexpr std::uint64_t kEightRows = static_cast<std::uint64_t>(1024 / 16) << 32;
  return kSwizzle128 | kEightRows | static_cast<std::uint64_t>(tile_bytes / 16) << 16 | (shared & 0x3ffffU) / 16;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "plans for sm_90 use wgmma: build for 90a, not 90"
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define KVONCE_16(a, i)                                                                                        \
  "+f"((a)[(i) + 0]), "+f"((a)[(i) + 1]), "+f"((a)[(i) + 2]), "+f"((a)[(i) + 3]), "+f"((a)[(i) + 4]),          \
      "+f"((a)[(i) + 5]), "+f"((a)[(i) + 6]), "+f"((a)[(i) + 7]), "+f"((a)[(i) + 8]), "+f"((a)[(i) + 9]),      \
      "+f"((a)[(i) + 10]), "+f"((a)[(i) + 11]), "+f"((a)[(i) + 12]), "+f"((a)[(i) + 13]), "+f"((a)[(i) + 14]), \
      "+f"((a)[(i) + 15])
#define KVONCE_32_REGISTERS                                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define KVONCE_64_REGISTERS                                                                                          \
  KVONCE_32_REGISTERS                                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// The three forms that attention takes, for one type. c (+)= a * b, c [64][N] in float32.
#define KVONCE_WARPGROUP_MMA(type, name)                                                                            \
  /* a [64][16], b [64 columns][16], both in shared memory; adds to c where `adds` is not 0 */                      \
  __device__ __forceinline__ void warpgroup_mma(float(&c)[32], std::uint64_t a, std::uint64_t b, int adds, type) {  \
    asm volatile(                                                                                                   \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"                                                          \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" KVONCE_32_REGISTERS                        \
        "}, %32, %33, p, 1, 1, 0, 0;\n\t}"                                                                          \
        : KVONCE_16(c, 0), KVONCE_16(c, 16)                                                                         \
        : "l"(a), "l"(b), "r"(adds));                                                                               \
  }                                                                                                                 \
  /* a in registers, b [16][64] in shared memory with its columns side by side */                                   \
  __device__ __forceinline__ void warpgroup_mma(float(&c)[32], const std::uint32_t(&a)[4], std::uint64_t b, type) { \
    asm volatile(                                                                                                   \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, 1, 0;\n\t"                                                            \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" KVONCE_32_REGISTERS                        \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n\t}"                                                            \
        : KVONCE_16(c, 0), KVONCE_16(c, 16)                                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                      \
  }                                                                                                                 \
  /* the same with 128 columns */                                                                                   \
  __device__ __forceinline__ void warpgroup_mma(float(&c)[64], const std::uint32_t(&a)[4], std::uint64_t b, type) { \
    asm volatile(                                                                                                   \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, 1, 0;\n\t"                                                            \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {" KVONCE_64_REGISTERS                       \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n\t}"                                                            \
        : KVONCE_16(c, 0), KVONCE_16(c, 16), KVONCE_16(c, 32), KVONCE_16(c, 48)                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                      \
  }

KVONCE_WARPGROUP_MMA(bf16, "bf16")
KVONCE_WARPGROUP_MMA(f16, "f16")

#undef KVONCE_WARPGROUP_MMA
#undef KVONCE_64_REGISTERS
#undef KVONCE_32_REGISTERS
#undef KVONCE_16

/// Before the first product, and after registers of one were written.
__device__ __forceinline__ void warpgroup_open() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Waits for this warp's products.
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#else
template <int kCount, typename A, typename... Rest>
__device__ __forceinline__ void warpgroup_mma(float (&)[kCount], const A&, Rest...) {}
__device__ __forceinline__ void warpgroup_open() {}
__device__ __forceinline__ void warpgroup_wait() {}
#endif

/// Keeps the registers of a product where they are: they are written between the product and its end.
template <int kCount>
__device__ __forceinline__ void hold(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

/// 16 bytes into shared memory; close_copies() ends a group of them, and at most kLater groups are under way after
/// wait_for_copies().
__device__ __forceinline__ void copy_piece(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

/// What this thread stored or copied into shared memory becomes visible to the tensor cores.
__device__ __forceinline__ void show_to_tensor_cores() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void store_piece(std::uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint4 read_piece(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t read_word(std::uint32_t from) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

/// Barriers of the four warps of group 0 or 1.
__device__ __forceinline__ void sync_group(unsigned group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
__device__ __forceinline__ bool any_of_group(unsigned group, bool mine) {
  int any = 0;
  asm volatile(
      "{\n\t"
      ".reg .pred p, q;\n\t"
      "setp.ne.s32 p, %1, 0;\n\t"
      "bar.red.or.pred q, %2, 128, p;\n\t"
      "selp.s32 %0, 1, 0, q;\n\t"
      "}"
      : "=r"(any)
      : "r"(static_cast<int>(mine)), "r"(group + 1)
      : "memory");
  return any != 0;
}

}  // namespace kvonce::cuda
