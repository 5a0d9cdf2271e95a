#include "huge_pages.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string_view>

namespace kvonce::ggml {
namespace {

constexpr std::uintptr_t kHugePage = std::uintptr_t{1} << 21;
constexpr std::uintptr_t kWorthwhile = kHugePage / 8;  // read bytes of a huge page
constexpr int kCollapse = 25;                          // MADV_COLLAPSE, which older headers do not have

}  // namespace

HugePages::HugePages() {
  const char* setting = std::getenv("KVONCE_GGML_HUGE_PAGES");
  wanted_ = setting == nullptr || std::string_view(setting) != "0";
}

void HugePages::visit(const void* begin, std::size_t bytes) {
  if (!wanted_) return;
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t end = first + bytes;
  std::uintptr_t& page = done_.try_emplace(begin, first / kHugePage * kHugePage).first->second;
  if (page >= end || end - std::max(page, first) < kWorthwhile) return;
  // A failure leaves the memory as it was: no free huge page, or part of the range belongs to another mapping.
  if (::madvise(reinterpret_cast<void*>(page), kHugePage, kCollapse) != 0 && errno == EINVAL && done_.size() == 1) {
    wanted_ = false;
  }
  page += kHugePage;
}

}  // namespace kvonce::ggml
