// One way to say no: argument, what was given, what is allowed.
#pragma once

#include <string>

#include "kvonce/types.hpp"

namespace kvonce::core {

/// Throws Error{code, "<argument>: got <given>, allowed: <allowed>"}.
[[noreturn]] inline void refuse(ErrorCode code, const std::string& argument, const std::string& given,
                                const std::string& allowed) {
  throw Error(code, argument + ": got " + given + ", allowed: " + allowed);
}

}  // namespace kvonce::core
