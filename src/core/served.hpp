// What no backend serves yet, or one of them does not: one sentence each, and what to do instead.
#pragma once

#include <string>

#include "kvonce/problem.hpp"

namespace kvonce::core {

/// Throws Error{Unsupported, "<what> is not served by the <backend> backend yet; <instead>"} unless `served`.
void require_served(bool served, Backend backend, const std::string& what, const std::string& instead);

/// Caches in the strided layout, without segments. Throws as above.
void require_plain_layout(const Problem& problem, Backend backend);

/// Caches of f32, f16 or bf16 and, with `blocks`, of GGML's block formats. Throws as above.
void require_listed_formats(const Problem& problem, Backend backend, bool blocks);

/// Neither an array mask nor softcap nor ALiBi. Throws as above.
void require_plain_scores(const Problem& problem, Backend backend);

}  // namespace kvonce::core
