#include "merges.hpp"

#include <algorithm>
#include <numeric>

namespace kvonce::python {
namespace {

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

bool is_contiguous(const Array& array) {
  std::int64_t expected = 1;
  for (std::size_t i = array.shape.size(); i-- > 0;) {
    if (array.shape[i] > 1 && array.strides[i] != expected) return false;
    expected *= array.shape[i];
  }
  return true;
}

/// Appends the elements in C order.
void gather(const Array& array, std::size_t dim, const float* from, std::vector<float>& values) {
  if (dim == array.shape.size()) {
    values.push_back(*from);
    return;
  }
  for (std::int64_t i = 0; i < array.shape[dim]; ++i) gather(array, dim + 1, from + i * array.strides[dim], values);
}

/// Parts one after the other, each in C order.
struct Parts {
  nb::object first;         // an array whose kind the result gets
  Array whole;              // keeps `data` alive when nothing was gathered
  std::vector<float> copy;  // what was gathered
  const float* data = nullptr;
  std::int64_t num_parts = 0;
  std::vector<std::int64_t> shape;  // of one part
};

void require_f32(const Array& array, const char* name) {
  if (array.dtype != DType::f32) {
    refuse(name, "dtype " + std::string(to_string(array.dtype)), "float32 (attend with out_dtype=\"float32\")");
  }
}

Parts import_parts(nb::handle object, const char* name) {
  Parts parts;
  if (!nb::isinstance<nb::list>(object) && !nb::isinstance<nb::tuple>(object)) {
    parts.whole = import_array(object, name);
    require_place(parts.whole, name, Place());
    require_f32(parts.whole, name);
    if (parts.whole.shape.empty()) refuse(name, "shape []", "[num_parts, ...]");
    parts.first = nb::borrow(object);
    parts.num_parts = parts.whole.shape.front();
    parts.shape.assign(parts.whole.shape.begin() + 1, parts.whole.shape.end());
    if (is_contiguous(parts.whole)) {
      parts.data = static_cast<const float*>(parts.whole.data);
    } else {
      gather(parts.whole, 0, static_cast<const float*>(parts.whole.data), parts.copy);
      parts.data = parts.copy.data();
    }
    return parts;
  }
  for (const nb::handle item : object) {
    const std::string item_name = std::string(name) + "[" + std::to_string(parts.num_parts) + "]";
    const Array part = import_array(item, item_name.c_str());
    require_place(part, item_name.c_str(), Place());
    require_f32(part, item_name.c_str());
    if (parts.num_parts++ == 0) {
      parts.first = nb::borrow(item);
      parts.shape = part.shape;
    } else if (part.shape != parts.shape) {
      refuse(item_name, "shape " + shape_text(part.shape), shape_text(parts.shape) + ", as the first part");
    }
    gather(part, 0, static_cast<const float*>(part.data), parts.copy);
  }
  parts.data = parts.copy.data();
  return parts;
}

}  // namespace

nb::object merge(nb::handle outs, nb::handle lses) {
  const Parts o = import_parts(outs, "outs");
  const Parts lse = import_parts(lses, "lses");
  if (o.num_parts == 0) refuse("outs", "no part", "at least one");
  if (o.shape.empty()) refuse("outs", "parts of shape []", "[..., head_dim_v]");
  const std::vector<std::int64_t> rows(o.shape.begin(), o.shape.end() - 1);
  if (lse.num_parts != o.num_parts || lse.shape != rows) {
    refuse("lses", std::to_string(lse.num_parts) + " parts of shape " + shape_text(lse.shape),
           std::to_string(o.num_parts) + " parts of shape " + shape_text(rows));
  }
  MergeInputs inputs;
  inputs.o = o.data;
  inputs.lse = lse.data;
  inputs.num_parts = o.num_parts;
  inputs.num_rows = product(rows);
  inputs.head_dim_v = o.shape.back();
  inputs.o_part_stride = inputs.num_rows * inputs.head_dim_v;
  inputs.o_row_stride = inputs.head_dim_v;
  inputs.lse_part_stride = inputs.num_rows;
  const Result merged = make_result(o.first, DType::f32, o.shape);
  const Result merged_lse = make_result(o.first, DType::f32, rows);
  {
    const nb::gil_scoped_release released;
    kvonce::merge(inputs, static_cast<float*>(merged.array.data), inputs.head_dim_v,
                  static_cast<float*>(merged_lse.array.data));
  }
  return nb::make_tuple(merged.finish(), merged_lse.finish());
}

}  // namespace kvonce::python
