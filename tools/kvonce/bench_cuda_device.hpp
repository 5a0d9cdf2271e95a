// Owners of what the CUDA runtime lends, for the benchmark: memory, a stream, events, graphs. Nothing here is copied.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace kvonce::tool {

/// Device memory, 256-byte aligned.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes) { allocate(bytes); }
  ~DeviceMemory() { release(); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// Gives back what it had. Throws Error{Unavailable} when the device has less memory to give.
  void allocate(std::size_t bytes);

  [[nodiscard]] char* data() const noexcept { return static_cast<char*>(data_); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  void release() noexcept;

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Waits until both sides have the bytes.
void copy_to_device(void* device, const void* host, std::size_t bytes);
void copy_to_host(void* host, const void* device, std::size_t bytes);

class CudaStream {
 public:
  CudaStream();
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  /// Also reports what kernels of the stream did wrong.
  void wait() const;
  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// What `enqueue` puts on the stream, as a graph; in device memory already.
class CudaGraph {
 public:
  CudaGraph(const CudaStream& stream, const std::function<void()>& enqueue);
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void launch(const CudaStream& stream) const;

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

/// Times graphs between two events. A kernel that holds the device back goes ahead, so that the host's time for a launch
/// is not in the figure.
class CudaTimer {
 public:
  CudaTimer();
  ~CudaTimer();
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;

  /// Microseconds of one launch of the graph.
  double time_us(const CudaGraph& graph, const CudaStream& stream);

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::int64_t hold_ns_ = 100000;  // grows when the host takes longer
};

}  // namespace kvonce::tool
