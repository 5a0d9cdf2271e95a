// DLPack's C exchange API: what a tensor's class offers to be read without a call of Python (torch since 2.15).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace kvonce::python {

/// The beginning of DLPackExchangeAPI of dlpack.h 1.3; of the functions that are not called only the place.
struct ExchangeApi {
  std::uint32_t major;
  std::uint32_t minor;
  const ExchangeApi* earlier;  // of an older major version, or null
  void (*managed_tensor_allocator)();
  void (*managed_tensor_from_py_object_no_sync)();
  void (*managed_tensor_to_py_object_no_sync)();
  /// Fills `tensor`, whose pointers live as long as the object is unchanged. Not 0: an exception is set. May be null.
  int (*dltensor_from_py_object_no_sync)(void* py_object, nanobind::dlpack::dltensor* tensor);
};

/// Whether the object's class offers the API and it could describe the object. No exception is left.
inline bool import_by_exchange_api(nanobind::handle object, nanobind::dlpack::dltensor& tensor) {
  namespace nb = nanobind;
  const nb::object capsule = nb::getattr(object.type(), "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return false;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->major != 1) api = api->earlier;
  if (api == nullptr || api->dltensor_from_py_object_no_sync == nullptr) return false;
  if (api->dltensor_from_py_object_no_sync(object.ptr(), &tensor) == 0) return true;
  PyErr_Clear();
  return false;
}

}  // namespace kvonce::python
