// Arrays of NumPy, torch and others as the library sees them, and results of the same kind. Nothing copies q, K or V.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvonce/kvonce.hpp"

namespace kvonce::python {

namespace nb = nanobind;

/// Throws Error{InvalidArgument, "<argument>: got <given>, allowed: <allowed>"}.
[[noreturn]] void refuse(const std::string& argument, const std::string& given, const std::string& allowed);

/// "[1, 8, 1, 128]".
std::string shape_text(const std::vector<std::int64_t>& shape);

/// An array in CPU memory, kept alive while this exists.
struct Array {
  nb::ndarray<nb::ro> memory;  // keeps the memory, or invalid:
  nb::object owner;            // the array itself does, which DLPack's C exchange API described
  void* data = nullptr;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
};

/// An f32, f16 or bf16 array. `writable`: it will be written. Throws Error{InvalidArgument} for everything that is not
/// one, for memory of another device, for tensors with requires_grad, and when elements are not aligned.
Array import_array(nb::handle object, const char* name, bool writable = false);

/// Refuses a last dim whose elements are not neighbours.
void require_unit_last_stride(const Array& array, const char* name);

/// An array of the same kind as `like` (NumPy, torch; otherwise that of its array namespace, or a plain DLPack object),
/// not initialised. `array` is its memory; `finish` makes it what the caller gets.
struct Result {
  Array array;
  nb::object object;
  nb::object array_namespace;  // from_dlpack() of it makes the result; none: `object` is the result

  [[nodiscard]] nb::object finish() const;
};
Result make_result(nb::handle like, DType dtype, const std::vector<std::int64_t>& shape);

/// int32 or int64 array [count] or a sequence of ints, copied. Values outside int32 are refused.
std::vector<std::int32_t> import_lengths(nb::handle object, const char* name, std::int64_t count);

/// float32 or float64 array [count] or a sequence of floats, copied.
std::vector<float> import_floats(nb::handle object, const char* name, std::int64_t count);

}  // namespace kvonce::python
