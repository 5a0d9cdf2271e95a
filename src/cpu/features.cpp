#include "cpu/features.hpp"

#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#if defined(KVONCE_X86)
#include <cpuid.h>
#elif defined(KVONCE_AARCH64)
#include <sys/auxv.h>
#endif

namespace kvonce::cpu {

std::string missing_feature(std::string_view target) {
  if (target == "portable") return "";
  [[maybe_unused]] const auto need = [&target](bool has, const char* feature) {
    return has ? std::string() : "target " + std::string(target) + ": this processor has no " + feature;
  };
#if defined(KVONCE_X86)
  // These builtins also ask the operating system whether it saves the wide registers.
  __builtin_cpu_init();
  std::string missing = need(__builtin_cpu_supports("avx2") != 0, "AVX2");
  if (missing.empty()) missing = need(__builtin_cpu_supports("fma") != 0, "FMA");
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (missing.empty()) {
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    missing = need(f16c, "F16C");
  }
  if (!missing.empty() || target == "avx2") return missing;
  const bool avx512 = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  missing = need(avx512, "AVX-512 F, BW, DQ and VL");
  if (!missing.empty() || target == "avx512") return missing;
  constexpr unsigned kAvx512Bf16Bit = 1U << 5;
  const bool bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvx512Bf16Bit) != 0;
  return need(bf16, "AVX-512 BF16");
#elif defined(KVONCE_AARCH64)
  // The kernel's own numbering of HWCAP and HWCAP2, which older C libraries do not name.
  constexpr unsigned long kAsimdBit = 1UL << 1;
  constexpr unsigned long kBf16Bit = 1UL << 14;
  const std::string missing = need((getauxval(AT_HWCAP) & kAsimdBit) != 0, "NEON (FEAT_AdvSIMD)");
  if (!missing.empty() || target == "neon") return missing;
  return need((getauxval(AT_HWCAP2) & kBf16Bit) != 0, "BF16 (FEAT_BF16)");
#else
  return "target " + std::string(target) + ": not built for this architecture";
#endif
}

bool fetches_line_pairs() {
#if defined(KVONCE_X86)
  // Measured: requests for every line win on Sapphire Rapids (plan.cpp), the first common one that multiplies bf16 pairs.
  return __builtin_cpu_is("intel") != 0 && !missing_feature("avx512_bf16").empty();
#else
  return false;
#endif
}

bool follows_prefetches() {
#if defined(KVONCE_X86)
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

bool has_fast_pair_dot() {
#if defined(KVONCE_X86)
  return missing_feature("avx512_bf16").empty() && __builtin_cpu_is("amd") != 0;
#elif defined(KVONCE_AARCH64)
  return missing_feature("neon_bf16").empty();
#else
  return false;
#endif
}

std::string processor_name() {
#if defined(KVONCE_X86)
  unsigned words[12] = {};
  bool known = true;
  for (unsigned i = 0; i < 3; ++i) {
    known = known &&
            __get_cpuid(0x80000002U + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]) != 0;
  }
  if (known) {
    char text[sizeof words + 1] = {};
    std::memcpy(text, words, sizeof words);
    std::string name(text);
    const std::size_t begin = name.find_first_not_of(' ');
    const std::size_t end = name.find_last_not_of(' ');
    if (begin != std::string::npos) return name.substr(begin, end - begin + 1);
  }
#endif
  return "unknown processor";
}

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return count;
  }
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int>(online) : 1;
}

CacheSizes cache_sizes() {
  CacheSizes sizes;
  // sysconf answers 0 for caches on many hosts, the kernel's own files do not.
  for (int idx = 0; idx < 8; ++idx) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(idx) + "/";
    std::ifstream level_file(folder + "level");
    std::ifstream type_file(folder + "type");
    std::ifstream size_file(folder + "size");
    int level = 0;
    std::string type;
    std::int64_t kilobytes = 0;
    if (!(level_file >> level) || !(type_file >> type) || !(size_file >> kilobytes)) continue;
    if (type == "Instruction") continue;
    const std::int64_t bytes = kilobytes * 1024;
    if (level == 1) sizes.l1_bytes = bytes;
    if (level == 2) sizes.l2_bytes = bytes;
    if (level == 3) sizes.l3_bytes = bytes;
  }
  return sizes;
}

}  // namespace kvonce::cpu
