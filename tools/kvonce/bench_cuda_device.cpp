#include "kvonce/bench_cuda_device.hpp"

#include <fmt/format.h>

#include "baselines/cuda/kernels.hpp"
#include "baselines/cuda/status.hpp"

namespace kvonce::tool {

using bench::cuda::require_success;

void DeviceMemory::release() noexcept {
  (void)cudaFree(data_);
  data_ = nullptr;
  bytes_ = 0;
}

void DeviceMemory::allocate(std::size_t bytes) {
  release();
  const cudaError_t status = cudaMalloc(&data_, bytes);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    std::size_t available = 0;
    std::size_t total = 0;
    (void)cudaMemGetInfo(&available, &total);
    data_ = nullptr;
    throw Error(ErrorCode::Unavailable,
                fmt::format("case: its buffers take {:.2f} GiB, the device has {:.2f} GiB available",
                            static_cast<double>(bytes) * 0x1p-30, static_cast<double>(available) * 0x1p-30));
  }
  require_success(status, "allocating device memory");
  bytes_ = bytes;
}

void copy_to_device(void* device, const void* host, std::size_t bytes) {
  require_success(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copying to the device");
  require_success(cudaDeviceSynchronize(), "waiting for the device");  // a small copy may return before it is there
}

void copy_to_host(void* host, const void* device, std::size_t bytes) {
  require_success(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "copying from the device");
}

CudaStream::CudaStream() {
  require_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

CudaStream::~CudaStream() { (void)cudaStreamDestroy(stream_); }

void CudaStream::wait() const { require_success(cudaStreamSynchronize(stream_), "waiting for the stream"); }

CudaGraph::CudaGraph(const CudaStream& stream, const std::function<void()>& enqueue) {
  require_success(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
  try {
    enqueue();
  } catch (...) {
    (void)cudaStreamEndCapture(stream.get(), &graph_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
    throw;
  }
  require_success(cudaStreamEndCapture(stream.get(), &graph_), "ending a capture");
  cudaError_t status = cudaGraphInstantiate(&exec_, graph_, 0);
  if (status == cudaSuccess) status = cudaGraphUpload(exec_, stream.get());
  if (status == cudaSuccess) return;
  if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
  (void)cudaGraphDestroy(graph_);
  require_success(status, "instantiating a graph");
}

CudaGraph::~CudaGraph() {
  (void)cudaGraphExecDestroy(exec_);
  (void)cudaGraphDestroy(graph_);
}

void CudaGraph::launch(const CudaStream& stream) const {
  require_success(cudaGraphLaunch(exec_, stream.get()), "launching a graph");
}

CudaTimer::CudaTimer() {
  require_success(cudaEventCreate(&begin_), "creating an event");
  const cudaError_t status = cudaEventCreate(&end_);
  if (status != cudaSuccess) (void)cudaEventDestroy(begin_);
  require_success(status, "creating an event");
}

CudaTimer::~CudaTimer() {
  (void)cudaEventDestroy(begin_);
  (void)cudaEventDestroy(end_);
}

double CudaTimer::time_us(const CudaGraph& graph, const CudaStream& stream) {
  constexpr std::int64_t kLongestHold = 10000000;  // 10 ms
  for (;;) {
    bench::cuda::run_hold(hold_ns_, stream.get());
    require_success(cudaEventRecord(begin_, stream.get()), "recording an event");
    graph.launch(stream);
    require_success(cudaEventRecord(end_, stream.get()), "recording an event");
    const bool host_was_late = cudaEventQuery(begin_) == cudaSuccess;
    (void)cudaGetLastError();  // "not ready" is what is hoped for
    require_success(cudaEventSynchronize(end_), "running a graph");
    if (host_was_late && hold_ns_ < kLongestHold) {
      hold_ns_ *= 2;
      continue;
    }
    float ms = 0.0F;
    require_success(cudaEventElapsedTime(&ms, begin_, end_), "reading an event");
    return static_cast<double>(ms) * 1e3;
  }
}

}  // namespace kvonce::tool
