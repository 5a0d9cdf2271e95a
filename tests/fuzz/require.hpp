// What the fuzz entries hold true: an abort is a finding.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "kvonce/kvonce.hpp"

namespace kvonce::fuzz {

inline void require(bool holds) {
  if (!holds) std::abort();
}

/// One line of text, without control characters.
inline void require_message(const Error& error) {
  const std::string_view message = error.what();
  require(!message.empty());
  require(std::none_of(message.begin(), message.end(), [](char c) { return c >= 0 && c < 0x20; }));
}

}  // namespace kvonce::fuzz
