#include "cpu/chunk.hpp"
#include "cpu/merge.hpp"
#include "cpu/simd/neon.hpp"
#include "cpu/targets.hpp"

namespace kvonce::cpu::neon {

const Target kTarget = {Simd::kName,       Simd::width,        Simd::kMaxRowTile,
                        Simd::kHasPairDot, attend_chunk<Simd>, merge_rows<Simd>};

}  // namespace kvonce::cpu::neon
