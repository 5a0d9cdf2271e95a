// avx512_bf16: the avx512 verbs on a processor that also multiplies bf16 pairs (VDPBF16PS).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/unroll.hpp"
#include "kvonce/types.hpp"
#include "shared/ggml_blocks.h"
#include "shared/numeric.h"

#define KVONCE_TARGET_NAME "avx512_bf16"
#define KVONCE_TARGET_HAS_PAIR_DOT 1

namespace kvonce::cpu::avx512_bf16 {

#include "cpu/simd/avx512_verbs.hpp"

}  // namespace kvonce::cpu::avx512_bf16

#undef KVONCE_TARGET_NAME
#undef KVONCE_TARGET_HAS_PAIR_DOT
