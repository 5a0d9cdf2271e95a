// KVONCE_UNROLL before a loop of constant length keeps its arrays in registers, with gcc and clang alike.
// KVONCE_INLINE before a function that takes registers by reference does the same: gcc stops inlining when a file has grown
// enough, and the sums of sixteen accumulators then pass through memory (docs/kernel-cpu.md: 1.1 to 1.7 times the time).
// KVONCE_INLINE_ON_ARM after a lambda's parameters does the same for what it captures. gcc for AArch64 would call the
// lambda and keep accumulators in memory; gcc for x86 inlines it unasked, and asked it would stop inlining the caller.
#pragma once

#if defined(__clang__)
#define KVONCE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVONCE_UNROLL _Pragma("GCC unroll 32")
#endif

#define KVONCE_INLINE __attribute__((always_inline))

#if defined(__aarch64__)
#define KVONCE_INLINE_ON_ARM __attribute__((always_inline))
#else
#define KVONCE_INLINE_ON_ARM
#endif
