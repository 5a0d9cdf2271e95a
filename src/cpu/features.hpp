// What this processor and operating system offer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvonce::cpu {

/// Empty when the processor and the operating system run `target`; else the missing feature, as a sentence.
std::string missing_feature(std::string_view target);

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
