// The partial: (o, lse) of one row over one set of keys. o is the normalised output, lse the natural logarithm of the
// sum of exponentials. No keys: o = 0, lse = -inf, the neutral element of merge.
#pragma once

#include <cmath>

#include "shared/function.h"

namespace kvonce::shared {

constexpr float kLog2e = 1.44269504088896340736F;
constexpr float kLn2 = 0.69314718055994530942F;

/// The shift that keeps exp() in range when partials with largest lse `max_lse` are joined: 0 when there are no keys
/// at all, so that -inf - shift stays -inf instead of becoming NaN.
KVONCE_FN float merge_shift(float max_lse) { return max_lse == -INFINITY ? 0.0F : max_lse; }

/// lse of the union, from the sum of exp(lse_i - shift).
KVONCE_FN float merged_lse(float shift, float sum) { return sum == 0.0F ? -INFINITY : shift + std::log(sum); }

}  // namespace kvonce::shared
