#include "cpu/chunk.hpp"
#include "cpu/merge.hpp"
#include "cpu/simd/neon_bf16.hpp"
#include "cpu/targets.hpp"

namespace kvonce::cpu::neon_bf16 {

const Target kTarget = {
    Simd::kName,        Simd::width,     Simd::kMaxRowTile, Simd::kHasPairDot, value_vectors<Simd>(1) * Simd::width,
    attend_chunk<Simd>, merge_rows<Simd>};

}  // namespace kvonce::cpu::neon_bf16
