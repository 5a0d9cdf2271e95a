// The targets compiled into this build, each from its own translation unit.
#pragma once

#include "cpu/task.hpp"

namespace kvonce::cpu {

/// Every target of every architecture, best first.
constexpr const char* kTargetNames[] = {"avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "portable"};
/// The same for messages.
constexpr const char* kTargetList = "portable, avx2, avx512, avx512_bf16, neon, neon_bf16";

namespace portable {
extern const Target kTarget;
}
namespace avx2 {
extern const Target kTarget;
}
namespace avx512 {
extern const Target kTarget;
}
namespace avx512_bf16 {
extern const Target kTarget;
}
namespace neon {
extern const Target kTarget;
}
namespace neon_bf16 {
extern const Target kTarget;
}

}  // namespace kvonce::cpu
