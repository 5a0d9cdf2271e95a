// What the programs on a GPU share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "kvonce/types.hpp"

namespace kvonce::emulation {

inline void require_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::Internal, std::string("cuda: ") + what + ": " + cudaGetErrorString(status));
}

/// Device memory, filled with 0xff bytes (NaN in every type).
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    require_success(cudaMalloc(&data_, bytes), "allocating device memory");
    require_success(cudaMemset(data_, 0xff, bytes), "filling device memory");
  }
  DeviceMemory(const void* from, std::size_t bytes) : DeviceMemory(bytes) {
    if (bytes > 0) require_success(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice), "copying to the device");
  }
  ~DeviceMemory() { (void)cudaFree(data_); }
  DeviceMemory(DeviceMemory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  DeviceMemory& operator=(DeviceMemory&&) = delete;

  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  void copy_out(void* to) const {
    if (bytes_ > 0) require_success(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost), "copying from the device");
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Runs the seed's geometries and writes one JSON line per body: what its loads ask for, beside the bytes of K and V.
/// Returns the number of bodies that disagree with each other or with their read factor.
int count_bytes(std::int64_t kv_len);

}  // namespace kvonce::emulation
