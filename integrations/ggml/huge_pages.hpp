// Asks Linux to put a cache that is read again and again on huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace kvonce::ggml {

/// A decode step reads the whole cache once, a megabyte here and a megabyte there: on 4 KB pages a good part of its time is
/// looking addresses up. Zen 4 in a virtual machine, one thread, 9q/3kv d64 f16 at 7500 cells: 410 us on small pages, 320 us on huge ones.
class HugePages {
 public:
  HugePages();

  /// [begin, begin + bytes) is about to be read. Moves at most one huge page's worth of it, so that no step waits long: 1 to 3 ms.
  /// Memory that another call has grown on is taken up where the last one ended. Does nothing where Linux cannot (before
  /// 6.1) or KVONCE_GGML_HUGE_PAGES is 0.
  void visit(const void* begin, std::size_t bytes);

 private:
  bool wanted_;
  std::unordered_map<const void*, std::uintptr_t> done_;  // by begin: the first address that was not asked for
};

}  // namespace kvonce::ggml
