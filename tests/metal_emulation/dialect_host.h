// The names that the kernel bodies are written in (src/metal/dialect.h), for C++ on the host: lanes are fibers (lanes.hpp).
#pragma once

#include <cmath>

#include "lanes.hpp"
#include "msl_types.hpp"

#define KV_DEVICE
#define KV_CONSTANT
#define KV_THREADGROUP
#define KV_THREAD
#define KV_FN inline
#define KV_UNROLL

namespace kvonce_metal {

using kvonce::emulation::bfloat;
using kvonce::emulation::float2;
using kvonce::emulation::half;

using kvonce::emulation::Collective;

KV_FN float sum_lanes(float x) { return kvonce::emulation::collective(Collective::sum, x); }
KV_FN float max_lanes(float x) { return kvonce::emulation::collective(Collective::max, x); }
KV_FN float shuffle(float x, int lane) { return kvonce::emulation::collective(Collective::shuffle, x, lane); }
KV_FN float shuffle_xor(float x, int mask) { return kvonce::emulation::collective(Collective::shuffle_xor, x, mask); }
KV_FN void barrier() { kvonce::emulation::threadgroup_barrier(); }

KV_FN float exp2_fast(float x) {
  ++kvonce::emulation::counts().lane_exp2;
  return std::exp2(x);
}
KV_FN float log2_of(float x) {
  ++kvonce::emulation::counts().lane_log2;
  return std::log2(x);
}
KV_FN float tanh_of(float x) {
  ++kvonce::emulation::counts().lane_tanh;
  return std::tanh(x);
}
KV_FN float multiply_add(float a, float b, float c) { return a * b + c; }
KV_FN float larger(float a, float b) { return std::fmax(a, b); }

KV_FN int matrix_row(int lane) { return (lane & 16) / 4 + (lane & 6) / 2; }
KV_FN int matrix_column(int lane) { return (lane & 8) / 2 + (lane & 1) * 2; }
KV_FN void matrix_multiply_add(float2& d, float2 a, float2 b) {
  float sums[2] = {d.x, d.y};
  kvonce::emulation::matrix_multiply_add(sums, {a.x, a.y}, {b.x, b.y});
  d.x = sums[0];
  d.y = sums[1];
}

}  // namespace kvonce_metal
