#include "cpu/chunk.hpp"
#include "cpu/merge.hpp"
#include "cpu/simd/neon_bf16.hpp"
#include "cpu/targets.hpp"

namespace kvonce::cpu::neon_bf16 {

const Target kTarget = {Simd::kName,       Simd::width,        Simd::kMaxRowTile,
                        Simd::kHasPairDot, attend_chunk<Simd>, merge_rows<Simd>};

}  // namespace kvonce::cpu::neon_bf16
