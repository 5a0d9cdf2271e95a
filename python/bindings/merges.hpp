// merge of the partials that attend gave for disjoint token ranges.
#pragma once

#include "arrays.hpp"

namespace kvonce::python {

/// outs: [num_parts, ..., head_dim_v] or a list of [..., head_dim_v]; lses: the same without the last dim; all float32.
/// Returns (out, lse) of one part's shape. A list, or an array that is not C-contiguous, is gathered first.
nb::object merge(nb::handle outs, nb::handle lses);

}  // namespace kvonce::python
