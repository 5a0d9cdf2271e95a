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

/// Where memory is, in DLPack's numbers.
struct Place {
  int type = nb::device::cpu::value;
  int ordinal = 0;

  [[nodiscard]] bool is_cpu() const noexcept { return type == nb::device::cpu::value; }
  [[nodiscard]] bool is_cuda() const noexcept { return type == nb::device::cuda::value; }
  bool operator==(const Place&) const = default;
};
std::string to_string(Place place);  // "cpu", "cuda:0"

/// An array, kept alive while this exists.
struct Array {
  nb::ndarray<nb::ro> memory;  // keeps the memory, or invalid:
  nb::object owner;            // the array itself does, which DLPack's C exchange API described
  void* data = nullptr;
  nb::dlpack::dtype type{};
  DType dtype = DType::f32;  // the same, where it is one of these
  Place place;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
};

/// Whether the memory is a CUDA device's and the array neither torch's nor NumPy's.
bool is_foreign_cuda(nb::handle object);

/// An f32, f16 or bf16 array in CPU or CUDA memory. `writable`: it will be written. Throws Error{InvalidArgument} for
/// everything that is not one, for tensors with requires_grad, and when elements are not aligned. Nothing waits for
/// work on a CUDA device.
Array import_array(nb::handle object, const char* name, bool writable = false);

/// Codes of 8 or 4 bits, packed in uint32, int32 or uint8, low bits first; shape and strides count codes. Errors as
/// import_array(), and where the last dim is not contiguous.
Array import_codes(nb::handle object, const char* name, int bits);

/// A mask: bool or uint8 (0 hides) is `boolean`, f32, f16 and bf16 are `additive`, None is none. Errors as
/// import_array().
struct Mask {
  Array array;
  MaskKind kind = MaskKind::none;
};
Mask import_mask(nb::handle object);

/// Refuses memory elsewhere.
void require_place(const Array& array, const char* name, Place place);

/// Refuses a last dim whose elements are not neighbours.
void require_unit_last_stride(const Array& array, const char* name);

/// An array of the same kind as `like` (NumPy, torch on its device; otherwise that of its array namespace, or a plain
/// DLPack object), not initialised. `array` is its memory; `finish` makes it what the caller gets.
struct Result {
  Array array;
  nb::object object;
  nb::object array_namespace;  // from_dlpack() of it makes the result; none: `object` is the result

  [[nodiscard]] nb::object finish() const;
};
Result make_result(nb::handle like, DType dtype, const std::vector<std::int64_t>& shape);

/// A contiguous int32 array [count] in that CUDA memory.
Array import_device_lengths(nb::handle object, const char* name, std::int64_t count, Place place);
/// The same of float32.
Array import_device_floats(nb::handle object, const char* name, std::int64_t count, Place place);

/// int32 or int64 array [count] in CPU memory or a sequence of ints, copied. Values outside int32 are refused.
std::vector<std::int32_t> import_lengths(nb::handle object, const char* name, std::int64_t count);

/// float32 or float64 array [count] in CPU memory or a sequence of floats, copied.
std::vector<float> import_floats(nb::handle object, const char* name, std::int64_t count);

}  // namespace kvonce::python
