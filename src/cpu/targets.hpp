// The targets compiled into this build, each from its own translation unit.
#pragma once

#include "cpu/task.hpp"

namespace kvonce::cpu {

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

}  // namespace kvonce::cpu
