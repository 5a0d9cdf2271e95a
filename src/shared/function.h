// How a function in src/shared is declared. Internal linkage on purpose: translation units compiled for AVX-512 must not
// hand the linker a copy that the portable code then runs.
#pragma once

#if defined(__CUDACC__)
#define KVONCE_FN static __host__ __device__ inline
#else
#define KVONCE_FN static inline
#endif
