#include "arrays.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "exchange.hpp"

namespace kvonce::python {
namespace {

constexpr const char* kArrays = "a NumPy array, a torch tensor or another object with DLPack, in CPU memory";

std::string class_name_of(nb::handle object) {
  return nb::cast<std::string>(nb::str(nb::getattr(object.type(), "__name__")));
}

/// Whether `object` is of a module's class, which is remembered once the module has been imported.
bool is_instance(nb::handle object, const char* module_name, const char* class_name, PyTypeObject*& type) {
  if (type == nullptr) {
    const nb::object modules = nb::borrow(PyImport_GetModuleDict());
    const nb::handle module = PyDict_GetItemString(modules.ptr(), module_name);
    if (!module.is_valid() || module.is_none()) return false;
    const nb::object found = nb::getattr(module, class_name, nb::none());
    if (PyType_Check(found.ptr()) == 0) return false;
    type = reinterpret_cast<PyTypeObject*>(nb::object(found).release().ptr());
  }
  return PyObject_TypeCheck(object.ptr(), type) != 0;
}

bool is_numpy(nb::handle object) {
  static PyTypeObject* type = nullptr;
  return is_instance(object, "numpy", "ndarray", type);
}

bool is_torch(nb::handle object) {
  static PyTypeObject* type = nullptr;
  return is_instance(object, "torch", "Tensor", type);
}

nb::dlpack::dtype to_dlpack(DType dtype) {
  const auto code = dtype == DType::bf16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(dtype == DType::f32 ? 32 : 16), 1};
}

const char* numpy_name(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::f16 ? "float16" : "bfloat16";
}

std::string device_text(nb::handle object) {
  const nb::object method = nb::getattr(object, "__dlpack_device__", nb::none());
  if (method.is_none()) return "";
  try {
    const int device = nb::cast<int>(nb::object(method())[nb::int_(0)]);
    return device == nb::device::cpu::value ? "" : " in the memory of DLPack device type " + std::to_string(device);
  } catch (const std::exception&) {
    return "";  // the object's own trouble; its type is named anyway
  }
}

/// NumPy exports no bfloat16, so that its arrays cross as integers of the same size.
nb::object as_integers_if_bfloat16(nb::handle object) {
  if (!is_numpy(object)) return {};
  const nb::object dtype = object.attr("dtype");
  if (nb::cast<std::string>(dtype.attr("kind")) != "V") return {};  // quick, where the name takes a microsecond
  if (nb::cast<std::string>(dtype.attr("name")) != "bfloat16") return {};
  return object.attr("view")("uint16");
}

template <typename Nd>
bool to_ndarray(nb::handle object, Nd& array) {
  return nb::try_cast<Nd>(object, array) && array.is_valid();
}

nb::ndarray<nb::ro> import_memory(nb::handle object, const char* name, bool writable) {
  nb::ndarray<nb::ro> read_only;
  nb::ndarray<> read_write;
  const bool done = writable ? to_ndarray(object, read_write) : to_ndarray(object, read_only);
  if (!done) {
    const std::string allowed = std::string(kArrays) + (writable ? " that may be written" : "");
    refuse(name, "an object of type " + class_name_of(object) + device_text(object), allowed);
  }
  nb::ndarray<nb::ro> memory = writable ? nb::ndarray<nb::ro>(read_write) : read_only;
  if (memory.device_type() != nb::device::cpu::value) {
    refuse(name, "memory of DLPack device type " + std::to_string(memory.device_type()),
           "CPU memory; for CUDA memory use the C++ API or the C ABI");
  }
  return memory;
}

std::string dlpack_text(nb::dlpack::dtype dtype) {
  static constexpr const char* kCodes[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string code =
      dtype.code < std::size(kCodes) ? kCodes[dtype.code] : "code " + std::to_string(dtype.code) + " ";
  return "dtype " + code + std::to_string(dtype.bits);
}

void refuse_gradients(nb::handle object, const char* name) {
  if (is_numpy(object)) return;
  const nb::object flag = nb::getattr(object, "requires_grad", nb::none());
  if (PyBool_Check(flag.ptr()) != 0 && nb::cast<bool>(flag)) {
    refuse(name, "a tensor with requires_grad", "one without: no gradients are computed; pass tensor.detach()");
  }
}

template <typename T, typename Convert>
std::vector<T> import_numbers(nb::handle object, const char* name, std::int64_t count, const char* kinds,
                              const Convert& convert) {
  refuse_gradients(object, name);
  std::vector<T> values;
  nb::ndarray<nb::ro> array;
  if (to_ndarray(object, array)) {
    if (array.device_type() != nb::device::cpu::value) refuse(name, "memory of another device", "CPU memory");
    if (array.ndim() != 1 || static_cast<std::int64_t>(array.shape(0)) != count) {
      std::vector<std::int64_t> shape;
      for (std::size_t i = 0; i < array.ndim(); ++i) shape.push_back(static_cast<std::int64_t>(array.shape(i)));
      refuse(name, "shape " + shape_text(shape), "[" + std::to_string(count) + "]");
    }
    for (std::int64_t i = 0; i < count; ++i) values.push_back(convert(array, i));
    return values;
  }
  if (PySequence_Check(object.ptr()) == 0 || PyUnicode_Check(object.ptr()) != 0) {
    refuse(name, "an object of type " + class_name_of(object), kinds);
  }
  const auto length = static_cast<std::int64_t>(nb::len(object));
  if (length != count) refuse(name, std::to_string(length) + " values", std::to_string(count));
  for (std::int64_t i = 0; i < count; ++i) {
    T value{};
    if (!nb::try_cast<T>(nb::object(object[nb::int_(i)]), value)) {
      refuse(std::string(name) + "[" + std::to_string(i) + "]",
             nb::cast<std::string>(nb::repr(nb::object(object[nb::int_(i)]))), kinds);
    }
    values.push_back(value);
  }
  return values;
}

template <typename T>
T element(const nb::ndarray<nb::ro>& array, std::int64_t i) {
  return static_cast<const T*>(array.data())[i * array.stride(0)];
}

}  // namespace

void refuse(const std::string& argument, const std::string& given, const std::string& allowed) {
  throw Error(ErrorCode::InvalidArgument, argument + ": got " + given + ", allowed: " + allowed);
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

Array import_array(nb::handle object, const char* name, bool writable) {
  refuse_gradients(object, name);
  Array array;
  nb::dlpack::dtype dtype;
  nb::dlpack::dltensor tensor;
  if (!is_numpy(object) && import_by_exchange_api(object, tensor) &&
      tensor.device.device_type == nb::device::cpu::value && (tensor.strides != nullptr || tensor.ndim == 0)) {
    array.owner = nb::borrow(object);
    dtype = tensor.dtype;
    array.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    array.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
    array.strides.assign(tensor.strides, tensor.strides + tensor.ndim);
  } else {
    const nb::object integers = as_integers_if_bfloat16(object);
    array.memory = import_memory(integers.is_valid() ? nb::handle(integers) : object, name, writable);
    dtype = integers.is_valid() ? to_dlpack(DType::bf16) : array.memory.dtype();
    array.data = const_cast<void*>(array.memory.data());  // written only when imported as writable
    for (std::size_t i = 0; i < array.memory.ndim(); ++i) {
      array.shape.push_back(static_cast<std::int64_t>(array.memory.shape(i)));
      array.strides.push_back(array.memory.stride(i));
    }
  }
  if (dtype == to_dlpack(DType::bf16)) {
    array.dtype = DType::bf16;
  } else if (dtype == to_dlpack(DType::f16)) {
    array.dtype = DType::f16;
  } else if (dtype != to_dlpack(DType::f32)) {
    refuse(name, dlpack_text(dtype), "float32, float16, bfloat16");
  }
  const std::uintptr_t element_bytes = array.dtype == DType::f32 ? 4 : 2;
  if (reinterpret_cast<std::uintptr_t>(array.data) % element_bytes != 0) {
    refuse(name, "memory that is not aligned to its elements", "addresses that are multiples of the element's size");
  }
  return array;
}

void require_unit_last_stride(const Array& array, const char* name) {
  const bool is_empty = std::find(array.shape.begin(), array.shape.end(), 0) != array.shape.end();
  if (!is_empty && array.shape.back() > 1 && array.strides.back() != 1) {
    refuse(name, "a last dim of stride " + std::to_string(array.strides.back()), "1 (elements of a row side by side)");
  }
}

nb::object Result::finish() const {
  return array_namespace.is_valid() ? nb::object(array_namespace.attr("from_dlpack")(object)) : object;
}

Result make_result(nb::handle like, DType dtype, const std::vector<std::int64_t>& shape) {
  Result result;
  const char* name = numpy_name(dtype);
  nb::list sizes;
  for (const std::int64_t size : shape) sizes.append(size);
  if (is_numpy(like)) {
    nb::object type = nb::str(name);
    if (dtype == DType::bf16) {
      try {
        type = nb::module_::import_("ml_dtypes").attr("bfloat16");
      } catch (const nb::python_error&) {
        refuse("out_dtype", "bfloat16", "float32, float16; bfloat16 for NumPy needs the package ml_dtypes");
      }
    }
    result.object = nb::module_::import_("numpy").attr("empty")(sizes, type);
    result.array = import_array(result.object, "out", true);
    return result;
  }
  if (is_torch(like)) {
    const nb::module_ torch = nb::module_::import_("torch");
    result.object = torch.attr("empty")(sizes, nb::arg("dtype") = torch.attr(name));
    result.array = import_array(result.object, "out", true);
    return result;
  }
  std::size_t count = 1;
  std::vector<std::size_t> extents;
  for (const std::int64_t size : shape) {
    count *= static_cast<std::size_t>(size);
    extents.push_back(static_cast<std::size_t>(size));
  }
  auto memory = std::make_unique<float[]>(count);  // wide enough for every dtype
  float* data = memory.get();
  const nb::capsule owner(memory.release(), [](void* pointer) noexcept { delete[] static_cast<float*>(pointer); });
  result.object =
      nb::cast(nb::ndarray<nb::array_api>(data, extents.size(), extents.data(), owner, nullptr, to_dlpack(dtype)));
  result.array = import_array(result.object, "out", true);
  const nb::object get_namespace = nb::getattr(like, "__array_namespace__", nb::none());
  if (!get_namespace.is_none()) result.array_namespace = get_namespace();
  return result;
}

std::vector<std::int32_t> import_lengths(nb::handle object, const char* name, std::int64_t count) {
  constexpr const char* kKinds = "int32 or int64 values";
  return import_numbers<std::int32_t>(
      object, name, count, kKinds, [&](const nb::ndarray<nb::ro>& array, std::int64_t i) -> std::int32_t {
        if (array.dtype() == nb::dtype<std::int32_t>()) return element<std::int32_t>(array, i);
        if (array.dtype() != nb::dtype<std::int64_t>()) refuse(name, dlpack_text(array.dtype()), kKinds);
        const auto value = element<std::int64_t>(array, i);
        if (value < std::numeric_limits<std::int32_t>::min() || value > std::numeric_limits<std::int32_t>::max()) {
          refuse(std::string(name) + "[" + std::to_string(i) + "]", std::to_string(value), "values of 32 bits");
        }
        return static_cast<std::int32_t>(value);
      });
}

std::vector<float> import_floats(nb::handle object, const char* name, std::int64_t count) {
  constexpr const char* kKinds = "float32 or float64 values";
  return import_numbers<float>(object, name, count, kKinds, [&](const nb::ndarray<nb::ro>& array, std::int64_t i) {
    if (array.dtype() == nb::dtype<float>()) return element<float>(array, i);
    if (array.dtype() != nb::dtype<double>()) refuse(name, dlpack_text(array.dtype()), kKinds);
    return static_cast<float>(element<double>(array, i));
  });
}

}  // namespace kvonce::python
