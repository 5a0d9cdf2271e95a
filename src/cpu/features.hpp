// What this processor and operating system offer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvonce::cpu {

/// Empty when the processor and the operating system run `target`; else the missing feature, as a sentence.
std::string missing_feature(std::string_view target);

/// An L2 miss brings the other line of its 128-byte pair too: Intel's adjacent-line prefetcher.
bool fetches_line_pairs();

/// Prefetches in address order and into L2 beat four pages side by side into L1: AMD. Measured on Zen 4 (docs/kernel-cpu.md);
/// earlier and later Zen were not.
bool follows_prefetches();

/// VDPBF16PS beats shifting bf16 to float32 and multiplying that. On Zen 4 (EPYC, one thread, 32q/4kv d128 and 64q/8kv d64
/// kv=8192) it does: 13.3 GB/s against 10.2, 11.8 against 8.9; 21.0 against 19.0 at 32q/8kv, 19.1 and 19.2 at group 1. Measured on
/// Sapphire Rapids it does not: L2-resident, one thread, 8 rows, d128 11.3 GB/s against 14.1, d64 9.7 against 11.7. BFDOT counts
/// as fast on every AArch64 processor that has it, for half the multiply instructions and no conversion; not measured.
bool has_fast_pair_dot();

/// The processor's own name, "unknown processor" where it has none.
std::string processor_name();

/// CPUs this process may run on, at least 1.
int usable_cpus();

struct CacheSizes {
  std::int64_t l1_bytes = 0;
  std::int64_t l2_bytes = 0;
  std::int64_t l3_bytes = 0;
};
CacheSizes cache_sizes();

}  // namespace kvonce::cpu
