// neon: eight floats in two registers, the vectors that every AArch64 processor has.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "cpu/simd/store_lanes.hpp"
#include "cpu/simd/unroll.hpp"
#include "kvonce/types.hpp"
#include "shared/ggml_blocks.h"
#include "shared/numeric.h"

#define KVONCE_TARGET_NAME "neon"
#define KVONCE_TARGET_HAS_PAIR_DOT 0

namespace kvonce::cpu::neon {

#include "cpu/simd/neon_verbs.hpp"

}  // namespace kvonce::cpu::neon

#undef KVONCE_TARGET_NAME
#undef KVONCE_TARGET_HAS_PAIR_DOT
