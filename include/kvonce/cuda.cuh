// For kernels that run before or after attend() on a CUDA stream: the two lines that let attention start under the tail of
// the kernel before it. Device code only: include it from files that nvcc compiles. It needs nothing else of kvonce.
//
// PlanOptions::earlier_kv_ready states that K/V of tokens before kv_len - q_len, kv_lens and kv_starts were complete before
// the preceding kernel started. attend() is then launched with programmatic stream serialisation: it loads those tokens as
// soon as it is let in, and waits for the preceding kernel before it touches q, the newest q_len tokens or its outputs. It is
// let in when every block of the preceding kernel has triggered or ended, so this pays where the neighbours
//
//   1. call cuda_trigger_dependents() at their start,
//   2. call cuda_wait_for_preceding() before they touch anything that an earlier kernel writes or still reads, and
//   3. are launched with cudaLaunchAttributeProgrammaticStreamSerialization = 1, so that they start early themselves.
//
//   __global__ void write_q(...) {
//     kvonce::cuda_trigger_dependents();
//     kvonce::cuda_wait_for_preceding();
//     ... as before ...
//   }
//
// A kernel that triggers gives up nothing: whoever waits, waits until it has ended and all it wrote can be seen. Two cautions.
// Every kernel of such a chain has to wait, in each thread that touches what others write: behind one that does not, the next
// could run beside kernels further back. And kernels that trigger before they wait start one under the other, so "the
// preceding kernel started" may be early: the kernel that wrote the earlier tokens must lie before one that was launched
// without programmatic stream serialisation, or that triggered after its wait or not at all.
#pragma once

namespace kvonce {

/// Lets the next kernel of the stream start, if it was launched with programmatic stream serialisation, once every block has
/// called this or ended. Does nothing below sm_90.
__device__ __forceinline__ void cuda_trigger_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernel before this one in the stream has ended and what it wrote can be seen. Returns at once in a kernel
/// that was launched without programmatic stream serialisation, and below sm_90.
__device__ __forceinline__ void cuda_wait_for_preceding() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace kvonce
