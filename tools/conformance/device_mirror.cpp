#include "device_mirror.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

namespace kvonce::conformance {
namespace {

constexpr std::size_t kPage = GuardedBuffer::kPage;
constexpr int kUntouched = 0xff;

std::string& failure() {
  static std::string text;
  return text;
}

[[noreturn]] void fail(const std::string& what, const std::string& why) {
  throw Error(ErrorCode::Internal, what + ": " + why);
}

// An error that makes the context unusable comes back from every later call: then no further case can run.
void require(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  const std::string why = std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
  const cudaError_t now = cudaStreamQuery(nullptr);
  if (now != cudaSuccess && now != cudaErrorNotReady && failure().empty()) failure() = what + ": " + why;
  (void)cudaGetLastError();
  fail(what, why);
}

bool is_traced() {
  const char* value = std::getenv("KVONCE_TRACE");
  return value != nullptr && std::string_view(value) == "1";
}

std::size_t to_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Blocks of device memory that are never returned. Cases take pieces of them; when no case is left all is free again.
class Arena {
 public:
  // Begins at a page.
  unsigned char* take(std::size_t bytes) {
    constexpr std::size_t kBlock = std::size_t{512} << 20;
    ++num_users_;
    for (Block& block : blocks_) {
      if (block.size - block.used < bytes) continue;
      block.used += to_pages(bytes);
      return block.data + block.used - to_pages(bytes);
    }
    Block block;
    block.size = std::max(kBlock, to_pages(bytes));
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, block.size + kPage);
    if (status != cudaSuccess) {
      --num_users_;
      require(status, "device memory for cases, " + std::to_string(block.size) + " bytes");
    }
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    block.data = static_cast<unsigned char*>(memory) + (to_pages(address) - address);
    block.used = to_pages(bytes);
    blocks_.push_back(block);
    return block.data;
  }

  void leave() {
    if (--num_users_ > 0) return;
    for (Block& block : blocks_) block.used = 0;
  }

 private:
  struct Block {
    unsigned char* data = nullptr;
    std::size_t size = 0;
    std::size_t used = 0;
  };
  std::vector<Block> blocks_;
  int num_users_ = 0;
};

Arena& arena() {
  static Arena the_arena;
  return the_arena;
}

cudaStream_t own_stream() {
  static cudaStream_t stream = nullptr;
  if (stream == nullptr) require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "the stream for cases");
  return stream;
}

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

const std::string& device_failure() { return failure(); }

void wait_for_stream(void* stream, const std::string& what) {
  constexpr std::chrono::seconds kLongest{20};
  const auto begin = std::chrono::steady_clock::now();
  cudaError_t status = cudaErrorNotReady;
  while ((status = cudaStreamQuery(as_stream(stream))) == cudaErrorNotReady) {
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited > kLongest) {
      failure() = what + ": not finished after 20 seconds";
      // The CUDA runtime waits for its kernels when the process ends: leave before it does.
      std::atexit([] {
        std::fflush(nullptr);
        std::_Exit(EXIT_FAILURE);
      });
      fail(what, "not finished after 20 seconds: the kernel hangs");
    }
    if (waited > std::chrono::milliseconds(2)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  require(status, what);
}

DeviceCase::DeviceCase(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, void* stream)
    : plan_(plan), spec_(spec), tensors_(tensors), stream_(stream) {
  if (!failure().empty()) fail("not run", "the device is unusable since " + failure());
  if (is_traced()) {
    std::fprintf(stderr, "case %s [%s]\n", spec.name.c_str(), std::string(plan.kernel_id()).c_str());
    std::fflush(stderr);
  }
  if (stream_ == nullptr) stream_ = own_stream();

  for (const GuardedBuffer* buffer : tensors.input_buffers()) {
    ranges_.push_back({buffer->mapped(), buffer->mapped_bytes(), nullptr, false});
  }
  for (const GuardedBuffer* buffer : tensors.output_buffers()) {
    ranges_.push_back({buffer->mapped(), buffer->mapped_bytes(), nullptr, true});
  }
  // A page before and after each piece. The workspace ends at a page, or begins up to 255 bytes after one.
  const std::size_t offset = static_cast<std::size_t>(spec.seed * 7 % 256);
  const std::size_t workspace_pages = to_pages(offset + plan.workspace_bytes());
  std::size_t total = kPage;
  for (const Range& range : ranges_) total += range.bytes + kPage;
  total += workspace_pages + kPage;

  unsigned char* const memory = arena().take(total);
  try {
    require(cudaMemsetAsync(memory, kUntouched, total, as_stream(stream_)), spec.name + ": clearing device memory");
    unsigned char* at = memory + kPage;
    for (Range& range : ranges_) {
      range.device = at;
      at += range.bytes + kPage;
    }
    workspace_begin_ = at - kPage;
    workspace_end_ = at + workspace_pages + kPage;
    workspace_ = spec.seed % 3 == 0 ? at + workspace_pages - plan.workspace_bytes() : at + offset;
    upload();
    wait();
  } catch (...) {
    arena().leave();
    throw;
  }

  inputs_ = tensors.inputs();
  for (const void** pointer : {&inputs_.q.data, &inputs_.k.data, &inputs_.v.data}) *pointer = translate(*pointer);
  inputs_.kv_lens = static_cast<const std::int32_t*>(translate(inputs_.kv_lens));
  inputs_.kv_starts = static_cast<const std::int32_t*>(translate(inputs_.kv_starts));
  inputs_.sinks = static_cast<const float*>(translate(inputs_.sinks));
  outputs_ = tensors.outputs();
  outputs_.out = translate(outputs_.out);
  outputs_.lse = static_cast<float*>(translate(outputs_.lse));
}

DeviceCase::~DeviceCase() {
  // What is still running must not find its memory in another case's hands.
  if (failure().empty()) (void)cudaStreamSynchronize(as_stream(stream_));
  arena().leave();
}

// A pointer may stand at the end of its buffer: a tensor without elements.
void* DeviceCase::translate(const void* pointer) const {
  if (pointer == nullptr) return nullptr;
  const auto* const p = static_cast<const unsigned char*>(pointer);
  for (const Range& range : ranges_) {
    if (p >= range.host && p <= range.host + range.bytes) return range.device + (p - range.host);
  }
  fail(spec_.name, "a pointer of the case lies in none of its buffers");
}

void DeviceCase::upload() {
  for (const Range& range : ranges_) {
    if (range.is_output) continue;
    require(cudaMemcpyAsync(range.device, range.host, range.bytes, cudaMemcpyHostToDevice, as_stream(stream_)),
            spec_.name + ": copying the inputs");
  }
}

void DeviceCase::prepare() {
  Context context;
  context.cuda_stream = stream_;
  prepare_workspace(plan_, workspace_, plan_.workspace_bytes(), context);
}

void DeviceCase::reset_outputs() {
  for (const Range& range : ranges_) {
    if (!range.is_output) continue;
    require(cudaMemsetAsync(range.device, kUntouched, range.bytes, as_stream(stream_)), spec_.name + ": clearing out");
  }
}

void DeviceCase::attend() {
  Context context;
  context.cuda_stream = stream_;
  kvonce::attend(plan_, inputs_, outputs_, workspace_, plan_.workspace_bytes(), context);
}

void DeviceCase::wait() { wait_for_stream(stream_, spec_.name); }

void DeviceCase::check() {
  wait();
  Context context;
  context.cuda_stream = stream_;
  check_workspace(plan_, workspace_, plan_.workspace_bytes(), context);
}

std::string DeviceCase::workspace_margins() {
  const auto is_clean = [this](const unsigned char* begin, const unsigned char* end) {
    std::vector<unsigned char> bytes(static_cast<std::size_t>(end - begin));
    require(cudaMemcpyAsync(bytes.data(), begin, bytes.size(), cudaMemcpyDeviceToHost, as_stream(stream_)),
            spec_.name + ": reading around the workspace");
    wait();
    return std::all_of(bytes.begin(), bytes.end(), [](unsigned char b) { return b == kUntouched; });
  };
  if (is_clean(workspace_begin_, workspace_) && is_clean(workspace_ + plan_.workspace_bytes(), workspace_end_))
    return {};
  return "bytes around the workspace were written";
}

std::string DeviceCase::fetch() {
  wait();
  for (const Range& range : ranges_) {
    if (!range.is_output) continue;
    require(cudaMemcpyAsync(range.host, range.device, range.bytes, cudaMemcpyDeviceToHost, as_stream(stream_)),
            spec_.name + ": copying the outputs");
  }
  wait();
  const std::string margins = workspace_margins();
  return margins.empty() ? tensors_.stray_writes() : margins;
}

std::string run_device_case(const Plan& plan, const CaseSpec& spec, CaseTensors& tensors, const Context& context) {
  DeviceCase on_device(plan, spec, tensors, context.cuda_stream);
  on_device.reset_outputs();
  on_device.prepare();
  on_device.attend();
  on_device.check();
  if (const std::string stray = on_device.fetch(); !stray.empty()) return stray;
  const std::vector<unsigned char> first = tensors.result_bytes();
  on_device.reset_outputs();
  on_device.attend();
  on_device.check();
  if (const std::string stray = on_device.fetch(); !stray.empty()) return stray + " (second run)";
  if (tensors.result_bytes() != first) return "the second run in the same workspace gave other bits";
  return {};
}

}  // namespace kvonce::conformance
