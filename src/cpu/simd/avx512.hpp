// avx512: sixteen floats, AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/unroll.hpp"
#include "kvonce/types.hpp"
#include "shared/ggml_blocks.h"

#define KVONCE_TARGET_NAME "avx512"
#define KVONCE_TARGET_HAS_PAIR_DOT 0

namespace kvonce::cpu::avx512 {

#include "cpu/simd/avx512_verbs.hpp"

}  // namespace kvonce::cpu::avx512

#undef KVONCE_TARGET_NAME
#undef KVONCE_TARGET_HAS_PAIR_DOT
