// Which cases a measurement runs over.
#pragma once

#include <string>
#include <vector>

#include "kvonce/case_string.hpp"

namespace kvonce::tool {

/// Those of the file `cases_path` (empty: no file), then those of `case_texts`; the seed's table when there are none.
/// Throws Error{InvalidArgument} naming --cases or the case.
std::vector<CaseSpec> choose_cases(const std::string& cases_path, const std::vector<std::string>& case_texts);

}  // namespace kvonce::tool
