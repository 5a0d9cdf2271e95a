// Token arithmetic: which keys a row sees, and how a range splits into chunks. Integers only.
#pragma once

#include <cstdint>

#include "shared/function.h"

namespace kvonce::shared {

/// Half-open [begin, end); empty when begin >= end.
struct TokenRange {
  std::int64_t begin;
  std::int64_t end;
};

KVONCE_FN std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Keys that query token `query_idx` of `q_len` sees in a cache of kv_len tokens whose first kv_start are padding.
/// Bottom-right aligned: the newest query token stands at kv_len - 1. window == 0 means no window.
KVONCE_FN TokenRange visible_range(std::int64_t query_idx, std::int64_t q_len, std::int64_t kv_len,
                                   std::int64_t kv_start, bool causal, std::int64_t window) {
  const std::int64_t position = kv_len - q_len + query_idx;
  TokenRange range{kv_start, kv_len};
  if (causal && position + 1 < range.end) range.end = position + 1;
  if (window > 0 && position - window + 1 > range.begin) range.begin = position - window + 1;
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

}  // namespace kvonce::shared
