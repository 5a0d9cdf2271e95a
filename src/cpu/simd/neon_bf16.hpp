// neon_bf16: the neon verbs on a processor that also multiplies bf16 pairs (BFDOT of FEAT_BF16).
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "cpu/simd/store_lanes.hpp"
#include "cpu/simd/unroll.hpp"
#include "kvonce/types.hpp"
#include "shared/ggml_blocks.h"
#include "shared/numeric.h"

#define KVONCE_TARGET_NAME "neon_bf16"
#define KVONCE_TARGET_HAS_PAIR_DOT 1

namespace kvonce::cpu::neon_bf16 {

#include "cpu/simd/neon_verbs.hpp"

}  // namespace kvonce::cpu::neon_bf16

#undef KVONCE_TARGET_NAME
#undef KVONCE_TARGET_HAS_PAIR_DOT
