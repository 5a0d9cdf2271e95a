// Devices and launches: the CUDA runtime is used here and nowhere else.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/refuse.hpp"
#include "core/validate.hpp"
#include "cuda/backend.hpp"
#include "cuda/cuda_plan.hpp"
#include "cuda/kernels.hpp"
#include "shared/partial.h"

namespace kvonce::cuda {

namespace {

void require_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(ErrorCode::Internal, std::string("backend cuda: ") + what + ": " + cudaGetErrorString(status));
}

/// Makes a device current while it exists.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    require_success(cudaGetDevice(&before_), "device");
    if (before_ != ordinal) require_success(cudaSetDevice(ordinal), "device");
    changed_ = before_ != ordinal;
  }
  ~CurrentDevice() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// The capture that a stream is in: 0 and null when it is in none.
std::pair<std::uint64_t, cudaGraph_t> capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  require_success(cudaStreamGetCaptureInfo(stream, &status, &id, &graph), "capture");
#else
  require_success(cudaStreamGetCaptureInfo_v2(stream, &status, &id, &graph), "capture");
#endif
  if (status != cudaStreamCaptureStatusActive) return {0, nullptr};
  return {id, graph};
}

Device unavailable(const std::string& why) {
  Device device;
  device.backend = Backend::cuda;
  device.unavailable = "backend cuda: " + why + "; use backend cpu";
  return device;
}

Device describe(int ordinal) {
  cudaDeviceProp properties{};
  const cudaError_t status = cudaGetDeviceProperties(&properties, ordinal);
  if (status != cudaSuccess) return unavailable(cudaGetErrorString(status));
  Device device;
  device.backend = Backend::cuda;
  device.ordinal = ordinal;
  device.target = "sm_" + std::to_string(properties.major * 10 + properties.minor);
  device.name = properties.name;
  device.num_sms = properties.multiProcessorCount;
  device.l1_bytes = static_cast<std::int64_t>(properties.sharedMemPerMultiprocessor);
  device.l2_bytes = properties.l2CacheSize;
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, generic_kernel(128)) != cudaSuccess) {
    (void)cudaGetLastError();
    device.unavailable = "backend cuda: no kernels for " + device.target +
                         " in this build (configure with -D KVONCE_CUDA_ARCHS=...); use backend cpu";
  }
  return device;
}

std::vector<Device> find_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    if (status == cudaSuccess || status == cudaErrorNoDevice) return {unavailable("no CUDA device")};
    if (status == cudaErrorInsufficientDriver) {
      return {unavailable("no CUDA driver, or one older than the runtime this build uses (" +
                          std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) +
                          ")")};
    }
    return {unavailable(cudaGetErrorString(status))};
  }
  std::vector<Device> found;
  for (int ordinal = 0; ordinal < count; ++ordinal) found.push_back(describe(ordinal));
  return found;
}

/// Asked once: a device's properties take milliseconds.
std::vector<Device> devices() {
  static const std::vector<Device> found = find_devices();
  return found;
}

Element element_of(DType dtype) { return static_cast<Element>(dtype); }
Element element_of(KvFormat format) { return static_cast<Element>(format); }
std::int64_t element_bytes(Element type) { return type == kF32 ? 4 : 2; }

Strided strided(const TensorView& view) { return {view.data, view.token_stride, view.head_stride, view.seq_stride}; }

/// Whether every row of the tensor starts at a multiple of `bytes`.
bool is_aligned(const void* data, std::int64_t seq, std::int64_t head, std::int64_t token, Element type,
                std::int64_t bytes) {
  const std::int64_t size = element_bytes(type);
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0 && seq * size % bytes == 0 &&
         head * size % bytes == 0 && token * size % bytes == 0;
}
bool is_aligned(const Strided& t, Element type, std::int64_t bytes) {
  return is_aligned(t.data, t.seq, t.head, t.token, type, bytes);
}

/// False where a row does not start at a multiple of 16 bytes or a stride does not fit.
bool to_rows(const Strided& t, Element type, Rows& rows) {
  const std::int64_t size = element_bytes(type);
  const auto fits = [](std::int64_t n) { return n >= -2147483648LL && n <= 2147483647LL; };
  if (!is_aligned(t, type, 16) || !fits(t.token * size) || !fits(t.head * size / 16) || !fits(t.seq * size / 16)) {
    return false;
  }
  rows = {static_cast<const char*>(t.data), static_cast<std::int32_t>(t.token * size),
          static_cast<std::int32_t>(t.head * size / 16), static_cast<std::int32_t>(t.seq * size / 16)};
  return true;
}

char* aligned_base(void* workspace) {
  return reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(workspace) + 255) / 256 * 256);
}

const CudaPlan& cuda_plan(const core::PlanData& data) { return static_cast<const CudaPlan&>(*data.backend_plan); }

AttendParams make_params(const core::PlanData& data, const Inputs& in, const Outputs& out, void* workspace) {
  const Problem& p = data.problem;
  const CudaPlan& plan = cuda_plan(data);
  AttendParams a{};
  a.q = strided(in.q);
  a.k = strided(in.k);
  a.v = strided(in.v);
  a.out = out.out;
  a.out_seq = out.out_seq_stride;
  a.out_head = out.out_head_stride;
  a.out_token = out.out_token_stride;
  a.lse = out.lse;
  a.lse_seq = out.lse_seq_stride;
  a.lse_head = out.lse_head_stride;
  a.lse_token = out.lse_token_stride;
  a.kv_lens = in.kv_lens;
  a.kv_starts = in.kv_starts;
  a.sinks = in.sinks;
  char* const base = aligned_base(workspace);
  a.header = reinterpret_cast<std::uint32_t*>(base);
  a.tickets = reinterpret_cast<std::uint64_t*>(base + plan.tickets);
  a.partial_ml = reinterpret_cast<float2*>(base + plan.partial_ml);
  a.partial_o = reinterpret_cast<float*>(base + plan.partial_o);
  a.scale_log2 = *p.scale * shared::kLog2e;
  a.max_kv_len = static_cast<std::int32_t>(core::most_tokens(p, in));
  a.q_len = static_cast<std::int32_t>(p.q_len);
  a.group_size = static_cast<std::int32_t>(p.group_size());
  a.num_kv_heads = static_cast<std::int32_t>(p.num_kv_heads);
  a.head_dim_qk = static_cast<std::int32_t>(p.head_dim_qk);
  a.head_dim_v = static_cast<std::int32_t>(p.head_dim_v);
  a.q_len_magic = divide_magic(a.q_len);
  a.rows = static_cast<std::int32_t>(data.rows_per_stream);
  a.window = static_cast<std::int32_t>(p.window);
  a.q_type = element_of(p.q_dtype);
  a.k_type = element_of(p.k_format);
  a.v_type = element_of(p.v_format);
  a.out_type = element_of(p.out_dtype);
  a.causal = p.causal;
  const std::int64_t four = 4 * element_bytes(a.out_type);
  a.vector_out = is_aligned(a.out, a.out_seq, a.out_head, a.out_token, a.out_type, four);
  a.vector_kv =
      is_aligned(a.k, a.k_type, 4 * element_bytes(a.k_type)) && is_aligned(a.v, a.v_type, 4 * element_bytes(a.v_type));
  return a;
}

void apply(const KernelShape& shape, const Problem& p, AttendParams& a) {
  a.shape = shape;
  const bool fixed = a.kv_lens == nullptr && a.max_kv_len == p.max_kv_len && a.kv_starts == nullptr && a.window == 0 &&
                     shape.split_tokens == 0;
  a.share_tiles = fixed ? shape.share_tiles : -1;
  a.share_rest = shape.share_rest;
  a.share_splits = shape.share_splits;
}

/// Allows a kernel what the launch needs beyond what every kernel may have. A kernel's limits are the process's: every
/// call sets the same ones, so that calls of several threads do not undo each other's.
void allow(const void* kernel, int shared_bytes, int cluster_blocks) {
  constexpr int kStaticBytes = 12 * 1024;  // more than any kernel's own
  if (shared_bytes + kStaticBytes > 48 * 1024) {
    int ordinal = 0;
    int most = 0;
    require_success(cudaGetDevice(&ordinal), "device");
    require_success(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal), "shared memory");
    require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - kStaticBytes),
                    "shared memory");
  }
  if (cluster_blocks > 8) {
    require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster size");
  }
}

void launch(const core::PlanData& data, const void* kernel, int warps, int shared_bytes, AttendParams& a,
            cudaStream_t stream) {
  const Problem& p = data.problem;
  const bool cluster = a.shape.join == kJoinCluster;
  allow(kernel, shared_bytes, cluster ? a.shape.num_splits : 1);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(static_cast<unsigned>(warps) * 32);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (cluster) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(a.shape.num_splits), 1, 1};
    ++config.numAttrs;
  }
  if (a.earlier_kv_ready) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  constexpr std::int64_t kMaxGridZ = 65535;
  for (std::int64_t seq = 0; seq < p.num_seqs; seq += kMaxGridZ) {
    a.seq_begin = static_cast<std::int32_t>(seq);
    config.gridDim =
        dim3(static_cast<unsigned>(a.shape.num_splits), static_cast<unsigned>(a.num_kv_heads * a.shape.row_blocks),
             static_cast<unsigned>(std::min(kMaxGridZ, p.num_seqs - seq)));
    void* arguments[] = {&a};
    require_success(cudaLaunchKernelExC(&config, kernel, arguments), "launch");
  }
}

void attend(const core::PlanData& data, const Inputs& inputs, const Outputs& outputs, void* workspace,
            const Context& context) {
  const Problem& p = data.problem;
  if (p.num_seqs == 0 || p.q_len == 0) return;
  const CurrentDevice current(data.device.ordinal);
  const CudaPlan& plan = cuda_plan(data);
  AttendParams a = make_params(data, inputs, outputs, workspace);
  a.earlier_kv_ready = data.earlier_kv_ready;
  auto* const stream = static_cast<cudaStream_t>(context.cuda_stream);
  if (plan.mma.exists && to_rows(a.q, a.q_type, a.q_rows) && to_rows(a.k, a.k_type, a.k_rows) &&
      to_rows(a.v, a.v_type, a.v_rows)) {
    apply(plan.mma, p, a);
    const bool plain = plan.plain.has_value() && a.kv_starts == nullptr && a.vector_out;
    const MmaInstance& instance = plain ? *plan.plain : plan.instance;
    const void* const kernel = a.k_type == kBf16 ? mma_kernel_bf16(instance) : mma_kernel_f16(instance);
    const int shared_bytes = merge_shared_bytes(
        a.shape, instance.partials(), static_cast<int>(kMmaRows) * instance.row_tiles, a.head_dim_v, instance.kv_bytes);
    launch(data, kernel, instance.warps, shared_bytes, a, stream);
  } else {
    apply(plan.generic, p, a);
    const int shared_bytes = merge_shared_bytes(a.shape, kWarps, a.shape.rows_per_block, a.head_dim_v, 0);
    launch(data, generic_kernel(std::max(a.head_dim_qk, a.head_dim_v)), kWarps, shared_bytes, a, stream);
  }
}

void prepare_workspace(const core::PlanData& data, void* workspace, const Context& context) {
  if (data.workspace.total_bytes == 0) return;
  const CurrentDevice current(data.device.ordinal);
  const CudaPlan& plan = cuda_plan(data);
  auto* words = reinterpret_cast<std::uint32_t*>(aligned_base(workspace));
  auto first_partial = static_cast<std::int64_t>(plan.partial_ml / 4);
  auto end = static_cast<std::int64_t>(plan.end / 4);
  void* arguments[] = {static_cast<void*>(&words), &first_partial, &end};
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(256);
  config.gridDim = dim3(static_cast<unsigned>(std::clamp<std::int64_t>(end / 1024, 1, 1024)));
  config.stream = static_cast<cudaStream_t>(context.cuda_stream);
  require_success(cudaLaunchKernelExC(&config, prepare_kernel(), arguments), "preparing the workspace");
}

void check_workspace(const core::PlanData& data, void* workspace, const Context& context) {
  if (data.workspace.total_bytes == 0) return;
  const CurrentDevice current(data.device.ordinal);
  auto* const stream = static_cast<cudaStream_t>(context.cuda_stream);
  std::uint32_t header[2] = {};
  require_success(cudaMemcpyAsync(header, aligned_base(workspace), sizeof header, cudaMemcpyDeviceToHost, stream),
                  "reading the workspace");
  require_success(cudaStreamSynchronize(stream), "waiting for the stream");
  if (header[0] != kPreparedWord) {
    core::refuse(ErrorCode::InvalidArgument, "workspace", "one that was not prepared", "prepare_workspace() first");
  }
  if (header[1] != 0) {
    core::refuse(ErrorCode::InvalidArgument, "kv_lens", "a length that had to be clamped",
                 "0 to the call's kv_len, at most max_kv_len = " + std::to_string(data.problem.max_kv_len));
  }
}

}  // namespace

std::uint64_t capture_id(void* stream, int ordinal) {
  const CurrentDevice current(ordinal);
  return capture_of(static_cast<cudaStream_t>(stream)).first;
}

void retain_in_capture(void* stream, int ordinal, void (*release)(void*), void* object) {
  const CurrentDevice current(ordinal);
  cudaGraph_t const graph = capture_of(static_cast<cudaStream_t>(stream)).second;
  if (graph == nullptr)
    core::refuse(ErrorCode::InvalidArgument, "stream", "one without a capture", "one that captures");
  cudaUserObject_t user_object = nullptr;
  require_success(cudaUserObjectCreate(&user_object, object, release, 1, cudaUserObjectNoDestructorSync), "capture");
  require_success(cudaGraphRetainUserObject(graph, user_object, 1, cudaGraphUserObjectMove), "capture");
}

Device device(int ordinal) {
  const std::vector<Device> found = devices();
  if (found.front().target.empty()) throw Error(ErrorCode::Unavailable, found.front().unavailable);
  if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= found.size()) {
    core::refuse(ErrorCode::Unavailable, "ordinal", std::to_string(ordinal),
                 "0 to " + std::to_string(found.size() - 1) + ", the CUDA devices of this machine");
  }
  const Device& chosen = found[static_cast<std::size_t>(ordinal)];
  if (!chosen.unavailable.empty()) throw Error(ErrorCode::Unavailable, chosen.unavailable);
  return chosen;
}

const core::BackendTable& backend() {
  static constexpr core::BackendTable kTable = {Backend::cuda, devices,           plan,
                                                attend,        prepare_workspace, check_workspace};
  return kTable;
}

}  // namespace kvonce::cuda
