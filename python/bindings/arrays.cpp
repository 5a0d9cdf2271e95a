#include "arrays.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>

#include "exchange.hpp"

namespace kvonce::python {
namespace {

constexpr const char* kArrays = "a NumPy array, a torch tensor or another object with DLPack, in CPU or CUDA memory";

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

/// Where an object says that its memory is; nothing if it does not say.
std::optional<Place> place_of(nb::handle object) {
  const nb::object method = nb::getattr(object, "__dlpack_device__", nb::none());
  if (method.is_none()) return {};
  try {
    const nb::object place = method();
    return Place{nb::cast<int>(nb::int_(nb::object(place[0]))), nb::cast<int>(nb::int_(nb::object(place[1])))};
  } catch (const std::exception&) {
    return {};  // the object's own trouble; its type is named anyway
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

/// torch's own export, which does not wait for streams. Takes a microsecond less than its __dlpack__.
nb::object torch_capsule(nb::handle tensor) {
  static const nb::object& to_dlpack = *new nb::object(nb::module_::import_("torch.utils.dlpack").attr("to_dlpack"));
  try {
    return to_dlpack(tensor);
  } catch (const nb::python_error&) {
    return {};
  }
}

template <typename Nd>
bool to_ndarray(nb::handle object, nb::ndarray<nb::ro>& memory) {
  Nd array;
  if (!nb::try_cast<Nd>(object, array) || !array.is_valid()) return false;
  memory = nb::ndarray<nb::ro>(array);
  return true;
}

/// Fills `array` but for dtype. False when the object is no array that DLPack or the buffer protocol exports.
bool describe(nb::handle object, bool writable, Array& array) {
  const bool numpy = is_numpy(object);
  nb::dlpack::dltensor tensor;
  if (!numpy && import_by_exchange_api(object, tensor) && (tensor.strides != nullptr || tensor.ndim == 0)) {
    array.owner = nb::borrow(object);
    array.type = tensor.dtype;
    array.place = {tensor.device.device_type, tensor.device.device_id};
    array.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    array.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
    array.strides.assign(tensor.strides, tensor.strides + tensor.ndim);
    return true;
  }
  const nb::object integers = numpy ? as_integers_if_bfloat16(object) : nb::object();
  const nb::object capsule = !numpy && is_torch(object) ? torch_capsule(object) : nb::object();
  nb::handle exported = object;
  if (integers.is_valid()) exported = integers;
  if (capsule.is_valid()) exported = capsule;
  nb::ndarray<nb::ro>& memory = array.memory;
  if (!(writable ? to_ndarray<nb::ndarray<>>(exported, memory) : to_ndarray<nb::ndarray<nb::ro>>(exported, memory))) {
    return false;
  }
  array.type = integers.is_valid() ? to_dlpack(DType::bf16) : memory.dtype();
  array.place = {memory.device_type(), memory.device_id()};
  array.data = const_cast<void*>(memory.data());  // written only when imported as writable
  for (std::size_t i = 0; i < memory.ndim(); ++i) {
    array.shape.push_back(static_cast<std::int64_t>(memory.shape(i)));
    array.strides.push_back(memory.stride(i));
  }
  return true;
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

void require_vector(const Array& array, const char* name, std::int64_t count) {
  if (array.shape != std::vector<std::int64_t>{count}) {
    refuse(name, "shape " + shape_text(array.shape), "[" + std::to_string(count) + "]");
  }
}

Array import_device_vector(nb::handle object, const char* name, std::int64_t count, Place place,
                           nb::dlpack::dtype type) {
  const std::string allowed = "an array of " + dlpack_text(type) + " on " + to_string(place) + ", as q";
  refuse_gradients(object, name);
  Array array;
  if (!describe(object, false, array)) refuse(name, "an object of type " + class_name_of(object), allowed);
  require_place(array, name, place);
  require_vector(array, name, count);
  if (array.type != type) refuse(name, dlpack_text(array.type), allowed);
  if (count > 1 && array.strides.front() != 1) {
    refuse(name, "a stride of " + std::to_string(array.strides.front()), "1 (elements side by side)");
  }
  return array;
}

template <typename T, typename Convert>
std::vector<T> import_numbers(nb::handle object, const char* name, std::int64_t count, const char* kinds,
                              const Convert& convert) {
  refuse_gradients(object, name);
  std::vector<T> values;
  Array array;
  if (describe(object, false, array)) {
    require_place(array, name, Place());
    require_vector(array, name, count);
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

/// Kept for good: Python's objects must not be destroyed after Python.
const nb::object* torch_dtype(const char* name) { return new nb::object(nb::module_::import_("torch").attr(name)); }

template <typename T>
T element(const Array& array, std::int64_t i) {
  return static_cast<const T*>(array.data)[i * array.strides.front()];
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

std::string to_string(Place place) {
  if (place.is_cpu()) return "cpu";
  if (place.is_cuda()) return "cuda:" + std::to_string(place.ordinal);
  return "DLPack device type " + std::to_string(place.type);
}

bool is_foreign_cuda(nb::handle object) {
  if (is_numpy(object) || is_torch(object)) return false;
  const std::optional<Place> place = place_of(object);
  return place && place->is_cuda();
}

void require_place(const Array& array, const char* name, Place place) {
  if (array.place != place) refuse(name, "memory of " + to_string(array.place), to_string(place));
}

Mask import_mask(nb::handle object) {
  Mask mask;
  if (object.is_none()) return mask;
  refuse_gradients(object, "mask");
  if (describe(object, false, mask.array) &&
      (mask.array.type == nb::dtype<bool>() || mask.array.type == nb::dtype<std::uint8_t>())) {
    mask.kind = MaskKind::boolean;
    return mask;
  }
  mask.array = import_array(object, "mask");
  mask.kind = MaskKind::additive;
  return mask;
}

Array import_array(nb::handle object, const char* name, bool writable) {
  refuse_gradients(object, name);
  Array array;
  if (!describe(object, writable, array)) {
    const std::optional<Place> place = place_of(object);
    refuse(name,
           "an object of type " + class_name_of(object) + (place && !place->is_cpu() ? " on " + to_string(*place) : ""),
           std::string(kArrays) + (writable ? " that may be written" : ""));
  }
  if (!array.place.is_cpu() && !array.place.is_cuda()) {
    refuse(name, "memory of " + to_string(array.place), "CPU or CUDA memory");
  }
  if (array.type == to_dlpack(DType::bf16)) {
    array.dtype = DType::bf16;
  } else if (array.type == to_dlpack(DType::f16)) {
    array.dtype = DType::f16;
  } else if (array.type != to_dlpack(DType::f32)) {
    refuse(name, dlpack_text(array.type), "float32, float16, bfloat16");
  }
  const std::uintptr_t element_bytes = array.dtype == DType::f32 ? 4 : 2;
  if (reinterpret_cast<std::uintptr_t>(array.data) % element_bytes != 0) {
    refuse(name, "memory that is not aligned to its elements", "addresses that are multiples of the element's size");
  }
  return array;
}

Array import_codes(nb::handle object, const char* name, int bits) {
  refuse_gradients(object, name);
  const std::string allowed = "codes of " + std::to_string(bits) + " bits packed in uint32, int32 or uint8";
  Array array;
  if (!describe(object, false, array)) refuse(name, "an object of type " + class_name_of(object), allowed);
  const bool is_integer = array.type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt) ||
                          array.type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
  if (!is_integer || array.type.lanes != 1 || (array.type.bits != 32 && array.type != nb::dtype<std::uint8_t>())) {
    refuse(name, dlpack_text(array.type), allowed);
  }
  require_unit_last_stride(array, name);
  if (array.shape.empty()) return array;
  const std::int64_t codes = array.type.bits / bits;
  for (std::int64_t& stride : array.strides) stride *= codes;
  array.shape.back() *= codes;
  array.strides.back() = 1;
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
    static const nb::object* const dtypes[] = {torch_dtype("float32"), torch_dtype("float16"), torch_dtype("bfloat16")};
    const nb::object& wanted = *dtypes[static_cast<std::size_t>(dtype)];
    const nb::object new_empty = like.attr("new_empty");
    result.object = like.attr("dtype").is(wanted) ? new_empty(sizes) : new_empty(sizes, nb::arg("dtype") = wanted);
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

Array import_device_lengths(nb::handle object, const char* name, std::int64_t count, Place place) {
  return import_device_vector(object, name, count, place, nb::dtype<std::int32_t>());
}

Array import_device_floats(nb::handle object, const char* name, std::int64_t count, Place place) {
  return import_device_vector(object, name, count, place, nb::dtype<float>());
}

std::vector<std::int32_t> import_lengths(nb::handle object, const char* name, std::int64_t count) {
  constexpr const char* kKinds = "int32 or int64 values";
  return import_numbers<std::int32_t>(
      object, name, count, kKinds, [&](const Array& array, std::int64_t i) -> std::int32_t {
        if (array.type == nb::dtype<std::int32_t>()) return element<std::int32_t>(array, i);
        if (array.type != nb::dtype<std::int64_t>()) refuse(name, dlpack_text(array.type), kKinds);
        const auto value = element<std::int64_t>(array, i);
        if (value < std::numeric_limits<std::int32_t>::min() || value > std::numeric_limits<std::int32_t>::max()) {
          refuse(std::string(name) + "[" + std::to_string(i) + "]", std::to_string(value), "values of 32 bits");
        }
        return static_cast<std::int32_t>(value);
      });
}

std::vector<float> import_floats(nb::handle object, const char* name, std::int64_t count) {
  constexpr const char* kKinds = "float32 or float64 values";
  return import_numbers<float>(object, name, count, kKinds, [&](const Array& array, std::int64_t i) {
    if (array.type == nb::dtype<float>()) return element<float>(array, i);
    if (array.type != nb::dtype<double>()) refuse(name, dlpack_text(array.type), kKinds);
    return static_cast<float>(element<double>(array, i));
  });
}

}  // namespace kvonce::python
