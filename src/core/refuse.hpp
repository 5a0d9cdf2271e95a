// One way to say no: argument, what was given, what is allowed.
#pragma once

#include <string>
#include <string_view>

#include "kvonce/types.hpp"

namespace kvonce::core {

/// Throws Error{code, "<argument>: got <given>, allowed: <allowed>"}.
[[noreturn]] inline void refuse(ErrorCode code, const std::string& argument, const std::string& given,
                                const std::string& allowed) {
  throw Error(code, argument + ": got " + given + ", allowed: " + allowed);
}

/// Text from outside for a message: one line, printable, at most 80 characters.
inline std::string printable(std::string_view text) {
  constexpr std::size_t kMaxChars = 80;
  std::string shown;
  for (const char c : text.substr(0, kMaxChars)) shown += c >= ' ' && c <= '~' ? c : '?';
  return shown + (text.size() > kMaxChars ? "..." : "");
}

inline std::string quoted(std::string_view text) { return "'" + printable(text) + "'"; }

}  // namespace kvonce::core
