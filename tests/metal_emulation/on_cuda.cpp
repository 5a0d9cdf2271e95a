// The same cases as the emulation's tests, on an NVIDIA GPU: a simdgroup is a warp. Evidence about the algorithm, never about
// the speed of Metal. One JSON line per case on standard output, a sum on standard error.
#include "on_cuda.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "cuda_kernels.hpp"
#include "emulated_case.hpp"

namespace kvonce::emulation {

void enqueue_attend(const Launch& launch, const AttendArgs& args) {
  CudaAttend kernel = find_seed_attend(launch.instance);
  if (kernel == nullptr) kernel = find_other_attend(launch.instance);
  if (kernel == nullptr) throw Error(ErrorCode::Unsupported, "instances.def has no " + launch.instance.name());
  const dim3 grid(static_cast<unsigned>(launch.grid_x), static_cast<unsigned>(launch.grid_y),
                  static_cast<unsigned>(launch.grid_z));
  AttendArgs copy = args;
  void* arguments[] = {&copy};
  require_success(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid,
                                   dim3(static_cast<unsigned>(32 * launch.num_simdgroups)), arguments,
                                   static_cast<std::size_t>(launch.shared_floats) * 4, nullptr),
                  "launching attend");
}

void enqueue_merge(const Launch& launch, const MergeArgs& args) {
  CudaMerge kernel = find_seed_merge(launch.instance.dtype, launch.instance.head_dim_v);
  if (kernel == nullptr) kernel = find_other_merge(launch.instance.dtype, launch.instance.head_dim_v);
  if (kernel == nullptr) throw Error(ErrorCode::Unsupported, "no merge of " + launch.instance.name());
  MergeArgs copy = args;
  void* arguments[] = {&copy};
  require_success(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(launch.num_rows)),
                                   dim3(static_cast<unsigned>(32 * launch.merge_simdgroups)), arguments,
                                   static_cast<std::size_t>(launch.merge_shared_floats) * 4, nullptr),
                  "launching the merge");
}

std::string run_launch(const Launch& launch, const Inputs& inputs, std::uint64_t, void* out, float* lse, Counts*,
                       std::span<const Region> regions) {
  std::vector<DeviceMemory> mirrors;
  for (const Region& region : regions) mirrors.emplace_back(region.begin, region.bytes);
  const auto on_device = [&]<typename T>(const T* pointer) -> const T* {
    if (pointer == nullptr) return nullptr;
    const auto at = reinterpret_cast<std::uintptr_t>(pointer);
    for (std::size_t i = 0; i < regions.size(); ++i) {
      const auto begin = reinterpret_cast<std::uintptr_t>(regions[i].begin);
      if (at < begin || at > begin + regions[i].bytes) continue;
      return reinterpret_cast<const T*>(mirrors[i].as<unsigned char>() + (at - begin));
    }
    throw Error(ErrorCode::Internal, "an input lies in no region");
  };
  const DeviceMemory params(launch.params.data(), sizeof launch.params);
  const DeviceMemory scalars(launch.scalars.data(), sizeof launch.scalars);
  const DeviceMemory strides(launch.strides.data(), sizeof launch.strides);
  const auto* const stride = strides.as<std::int64_t>();
  const auto num_partials = static_cast<std::size_t>(launch.num_rows * launch.num_chunks());
  const auto dim_v = static_cast<std::size_t>(launch.instance.head_dim_v);
  const DeviceMemory partial_o(num_partials * dim_v * 4);
  const DeviceMemory partial_sums(num_partials * 8);
  const std::size_t element = launch.instance.dtype == DType::f32 ? 4 : 2;
  const DeviceMemory device_out(static_cast<std::size_t>(launch.num_rows) * dim_v * element);
  const DeviceMemory device_lse(static_cast<std::size_t>(launch.num_rows) * 4);
  enqueue_attend(launch, {on_device(inputs.q.data),
                          on_device(inputs.k.data),
                          on_device(inputs.v.data),
                          on_device(inputs.kv_lens),
                          on_device(inputs.kv_starts),
                          static_cast<const unsigned char*>(on_device(inputs.mask)),
                          on_device(inputs.alibi_slopes),
                          params.as<std::int64_t>(),
                          scalars.as<float>(),
                          stride,
                          stride + 4,
                          stride + 8,
                          stride + 12,
                          partial_o.as<float>(),
                          partial_sums.as<float>(),
                          on_device(inputs.k_scales.data),
                          on_device(inputs.k_biases.data),
                          on_device(inputs.v_scales.data),
                          on_device(inputs.v_biases.data),
                          stride + 16,
                          stride + 20,
                          stride + 24,
                          stride + 28});
  enqueue_merge(launch, {partial_o.as<float>(), partial_sums.as<float>(), on_device(inputs.sinks),
                         params.as<std::int64_t>(), device_out.as<void>(), device_lse.as<float>()});
  require_success(cudaDeviceSynchronize(), "running the kernels");
  std::vector<std::uint32_t> sums(num_partials * 2);
  partial_sums.copy_out(sums.data());
  if (std::find(sums.begin(), sums.end(), 0xffffffffU) != sums.end()) return "a partial was not written";
  device_out.copy_out(out);
  device_lse.copy_out(lse);
  return {};
}

namespace {

using conformance::CaseResult;

struct Tally {
  int passed = 0;
  int failed = 0;
  int skipped = 0;

  void add(const CaseResult& result) {
    const bool is_skipped =
        result.status == CaseResult::skipped || result.detail.starts_with("refused: the Metal bodies");
    (is_skipped ? skipped : result.status == CaseResult::passed ? passed : failed) += 1;
    const nlohmann::ordered_json line = {{"case", result.name},
                                         {"body", result.kernel_id},
                                         {"status", is_skipped                            ? "skipped"
                                                    : result.status == CaseResult::passed ? "passed"
                                                                                          : "failed"},
                                         {"rel_rms_error", result.rel_rms_error},
                                         {"detail", result.detail}};
    std::puts(line.dump().c_str());
    std::fflush(stdout);
  }
};

void run_grid(std::size_t cases_per_instance, Tally& tally) {
  for (const GridCase& one : grid_cases(cases_per_instance, 4e6)) {
    if (!conformance::is_wanted(one.spec.name)) continue;
    try {
      tally.add(check_emulated(one.spec, one.choice));
    } catch (const Error& error) {
      CaseResult result;
      result.name = one.spec.name;
      result.status = CaseResult::failed;
      result.detail = error.what();
      tally.add(result);
    }
  }
}

void run_exact(Tally& tally) {
  for (const Body body : {Body::vector, Body::matrix, Body::per_head}) {
    conformance::run_exact_emulated(BodyDevice::device(body), conformance::Level::quick,
                                    [&tally](const CaseResult& result) { tally.add(result); });
  }
}

constexpr const char* kUsage =
    "usage: metal_on_cuda grid [CASES_PER_INSTANCE] | exact | count [KV_LEN]\n"
    "  grid   the sampled grid against the fp64 oracle (default 5 cases per instance)\n"
    "  exact  inputs with known answers\n"
    "  count  the seed's geometries in f16 at KV_LEN tokens (default 32768): bytes by counters where CUPTI is built "
    "in\n"
    "  KVONCE_ONLY=TEXT in the environment: only cases whose name contains TEXT\n";

int run(const std::vector<std::string_view>& arguments) {
  const std::string_view mode = arguments.empty() ? "" : arguments[0];
  const std::int64_t number = arguments.size() > 1 ? std::atoll(arguments[1].data()) : 0;
  if (arguments.size() > 2 || (arguments.size() == 2 && (number < 1 || mode == "exact"))) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  if (mode == "count") return count_bytes(number > 0 ? number : 32768) == 0 ? 0 : 1;
  Tally tally;
  if (mode == "grid") {
    run_grid(number > 0 ? static_cast<std::size_t>(number) : 5, tally);
  } else if (mode == "exact") {
    run_exact(tally);
  } else {
    std::fputs(kUsage, stderr);
    return 2;
  }
  std::fprintf(stderr, "metal_on_cuda: %d passed, %d failed, %d skipped\n", tally.passed, tally.failed, tally.skipped);
  return tally.failed == 0 && tally.passed > 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvonce::emulation

int main(int argc, char** argv) {
  try {
    return kvonce::emulation::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "metal_on_cuda: %s\n", error.what());
    return 3;
  }
}
