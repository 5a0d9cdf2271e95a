// What Metal has and OpenCL C++ has not, as declarations: clang 14 then checks the text that MLX generates for Metal, address
// spaces among it, without generating code. It is no Metal compiler: it knows neither Metal's library nor its limits.
#pragma once

#define device __global
#define constant __constant
#define threadgroup __local
// Not __private: in OpenCL a method's own object lies in the generic space.
#define thread
#define INFINITY __builtin_inff()

typedef unsigned int uint;
typedef unsigned short ushort;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef float float2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef half float16_t;
typedef short bfloat16_t;  // a scalar of its size

namespace metal {

float simd_sum(float x);
float simd_max(float x);
float simd_shuffle(float x, ushort lane);
float simd_shuffle_xor(float x, ushort mask);
enum class mem_flags { mem_threadgroup };
void threadgroup_barrier(mem_flags memory);
float fma(float a, float b, float c);
float fmax(float a, float b);
namespace fast {
float exp2(float x);
}
namespace precise {
float log2(float x);
float tanh(float x);
}  // namespace precise

template <typename T, int kRows, int kColumns>
struct simdgroup_matrix {
  T elements[2];
  thread T* thread_elements();
};
void simdgroup_multiply_accumulate(thread simdgroup_matrix<float, 8, 8>& d, thread simdgroup_matrix<float, 8, 8>& a,
                                   thread simdgroup_matrix<float, 8, 8>& b, thread simdgroup_matrix<float, 8, 8>& c);

}  // namespace metal
