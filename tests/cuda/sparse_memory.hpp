// A range of device addresses that is mostly unmapped: tensors with offsets far beyond 2^31 elements, in little memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvonce::cuda_test {

/// The driver's functions for virtual memory, found through the runtime; nothing links with the driver.
class Driver {
 public:
  Driver() {
    find("cuMemGetAllocationGranularity", granularity_);
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", release_range);
    find("cuMemCreate", create);
    find("cuMemRelease", release);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaFree(nullptr) != cudaSuccess) missing_ += " a device";
    where.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    where.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    where.location.id = device;
    if (missing_.empty() && granularity_(&granule, &where, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS) {
      missing_ += " a granularity";
    }
  }

  /// Empty, or the names of what the driver does not have.
  [[nodiscard]] const std::string& missing() const { return missing_; }

  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) release_range = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  CUmemAllocationProp where = {};
  std::size_t granule = 0;

 private:
  template <typename Function>
  void find(const char* name, Function& function) {
    constexpr unsigned kVersion = 12000;
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) missing_ += std::string(" ") + name;
    function = reinterpret_cast<Function>(address);
  }

  decltype(&cuMemGetAllocationGranularity) granularity_ = nullptr;
  std::string missing_;
};

/// Physical memory.
class Chunk {
 public:
  Chunk(const Driver& driver, std::size_t bytes)
      : driver_(driver), bytes_((bytes + driver.granule - 1) / driver.granule * driver.granule) {
    valid_ = driver.create(&handle_, bytes_, &driver.where, 0) == CUDA_SUCCESS;
  }
  ~Chunk() {
    if (valid_) driver_.release(handle_);
  }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
  [[nodiscard]] bool valid() const { return valid_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  const Driver& driver_;
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t bytes_;
  bool valid_;
};

/// Addresses, of which parts are backed by chunks; a chunk may back several parts. What is not backed faults.
class SparseMemory {
 public:
  SparseMemory(const Driver& driver, std::size_t bytes)
      : driver_(driver), bytes_((bytes + driver.granule - 1) / driver.granule * driver.granule) {
    valid_ = driver.reserve(&begin_, bytes_, 0, 0, 0) == CUDA_SUCCESS;
  }
  ~SparseMemory() {
    (void)cudaDeviceSynchronize();
    for (const auto& [offset, size] : mapped_) driver_.unmap(begin_ + offset, size);
    if (valid_) driver_.release_range(begin_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  [[nodiscard]] bool valid() const { return valid_; }
  [[nodiscard]] unsigned char* data() const { return reinterpret_cast<unsigned char*>(begin_); }  // NOLINT
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  /// Backs [offset, offset + chunk.bytes()); offset is a multiple of the granule.
  bool back(std::size_t offset, const Chunk& chunk) {
    if (driver_.map(begin_ + offset, chunk.bytes(), 0, chunk.handle(), 0) != CUDA_SUCCESS) return false;
    mapped_[offset] = chunk.bytes();
    CUmemAccessDesc access = {};
    access.location = driver_.where.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return driver_.set_access(begin_ + offset, chunk.bytes(), &access, 1) == CUDA_SUCCESS;
  }

  [[nodiscard]] bool is_backed(std::size_t offset) const { return mapped_.count(offset) > 0; }

 private:
  const Driver& driver_;
  std::size_t bytes_;
  CUdeviceptr begin_ = 0;
  bool valid_;
  std::map<std::size_t, std::size_t> mapped_;
};

}  // namespace kvonce::cuda_test
