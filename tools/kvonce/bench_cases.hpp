// Which cases a measurement runs over.
#pragma once

#include <string>
#include <vector>

#include "kvonce/case_string.hpp"

namespace kvonce::tool {

/// Those of the file `cases_path` (empty: no file), then those of `case_texts`; when there are none, the backend's: the
/// seed's table on the CPU, bench/cases/cuda.txt on CUDA. Throws Error{InvalidArgument} naming --cases or the case.
std::vector<CaseSpec> choose_cases(const std::string& cases_path, const std::vector<std::string>& case_texts,
                                   Backend backend = Backend::cpu);

}  // namespace kvonce::tool
