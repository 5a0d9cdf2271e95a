// The order of calls: cuptiProfilerInitialize, DeviceSupported, GetChipName, GetCounterAvailability; HostInitialize,
// HostConfigAddMetrics, HostGetConfigImage; per count: RangeProfilerEnable, GetCounterDataSize, CounterDataImageInitialize,
// SetConfig (user range, user replay), then per pass Start, PushRange, the call, PopRange, Stop, until all passes are
// submitted; DecodeData, HostEvaluateToGpuValues, Disable.
#include "counters/cupti_profiler.hpp"

#include <cuda_runtime_api.h>
#include <cupti_profiler_host.h>
#include <cupti_profiler_target.h>
#include <cupti_range_profiler.h>
#include <cupti_result.h>
#include <cupti_target.h>
#include <cupti_version.h>
#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "baselines/cuda/status.hpp"
#include "kvonce/types.hpp"

namespace kvonce::tool {
namespace {

using bench::cuda::require_success;

constexpr std::size_t kNumRanges = 1;
constexpr const char* kRangeName = "call";

bool traced = false;

std::string status_text(CUptiResult status) {
  const char* text = nullptr;
  if (cuptiGetResultString(status, &text) != CUPTI_SUCCESS || text == nullptr) text = "unknown status";
  return fmt::format("{} ({})", text, static_cast<int>(status));
}

const char* advice(CUptiResult status) {
  switch (status) {
    case CUPTI_ERROR_INSUFFICIENT_PRIVILEGES:
      return "; counters need root, or the driver's option NVreg_RestrictProfilingToAdminUsers=0";
    case CUPTI_ERROR_HARDWARE_BUSY:
      return "; another profiler uses the counters";
    default:
      return "";
  }
}

template <class Params>
CUptiResult try_call(const char* name, CUptiResult (*function)(Params*), Params& params) {
  if (traced) fmt::print(stderr, "cupti: {} ...\n", name);
  const CUptiResult status = function(&params);
  if (traced) fmt::print(stderr, "cupti: {}: {}\n", name, status_text(status));
  return status;
}

template <class Params>
void call(const char* name, CUptiResult (*function)(Params*), Params& params) {
  const CUptiResult status = try_call(name, function, params);
  if (status == CUPTI_SUCCESS) return;
  throw Error(ErrorCode::Unavailable, fmt::format("{}: {}{}", name, status_text(status), advice(status)));
}

// All zero but for the size, by which CUPTI tells which fields there are.
#define KVONCE_CUPTI_PARAMS(type, variable) \
  type variable{};                          \
  variable.structSize = type##_STRUCT_SIZE
#define KVONCE_CUPTI_CALL(function, params) call(#function, function, params)

const char* level_text(CUpti_Profiler_Support_Level level) {
  switch (level) {
    case CUPTI_PROFILER_CONFIGURATION_SUPPORTED:
      return "supported";
    case CUPTI_PROFILER_CONFIGURATION_UNSUPPORTED:
      return "unsupported";
    case CUPTI_PROFILER_CONFIGURATION_DISABLED:
      return "disabled";
    default:
      return "unknown";
  }
}

// What the device says of itself. Not the last word: the calls that follow are.
void report_support(int ordinal) {
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_DeviceSupported_Params, params);
  params.cuDevice = ordinal;  // a CUdevice is the ordinal
  params.api = CUPTI_PROFILER_RANGE_PROFILING;
  KVONCE_CUPTI_CALL(cuptiProfilerDeviceSupported, params);
  if (params.isSupported == CUPTI_PROFILER_CONFIGURATION_SUPPORTED) return;
  fmt::print(stderr,
             "cuptiProfilerDeviceSupported: {}: architecture {}, SLI {}, vGPU {}, confidential compute {}, CMP {}, WSL "
             "{}\n",
             level_text(params.isSupported), level_text(params.architecture), level_text(params.sli),
             level_text(params.vGpu), level_text(params.confidentialCompute), level_text(params.cmp),
             level_text(params.wsl));
}

// What of the chip's counters the context lends; empty, which the host API takes too, when CUPTI does not say.
std::vector<std::uint8_t> counter_availability(CUcontext context) {
  constexpr const char* kName = "cuptiProfilerGetCounterAvailability";
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_GetCounterAvailability_Params, params);
  params.ctx = context;
  std::vector<std::uint8_t> image;
  CUptiResult status = try_call(kName, cuptiProfilerGetCounterAvailability, params);
  if (status == CUPTI_SUCCESS) {
    image.resize(params.counterAvailabilityImageSize);
    params.pCounterAvailabilityImage = image.data();
    status = try_call(kName, cuptiProfilerGetCounterAvailability, params);
  }
  if (status == CUPTI_SUCCESS) return image;
  fmt::print(stderr, "{}: {}{}\n", kName, status_text(status), advice(status));
  return {};
}

// Not linked: the lists of a chip's metrics are to be had on machines without a driver.
CUcontext current_context() {
  constexpr unsigned kCudaVersion = 12000;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  require_success(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &entry, kCudaVersion, cudaEnableDefault, &found),
                  "finding cuCtxGetCurrent");
  CUcontext context = nullptr;
  if (found == cudaDriverEntryPointSuccess && entry != nullptr) {
    const CUresult status = reinterpret_cast<CUresult (*)(CUcontext*)>(entry)(&context);
    if (status != CUDA_SUCCESS) context = nullptr;
  }
  if (context == nullptr) throw Error(ErrorCode::Unavailable, "cuCtxGetCurrent: there is no current context");
  return context;
}

std::vector<const char*> pointers(const std::vector<std::string>& names) {
  std::vector<const char*> result;
  result.reserve(names.size());
  for (const std::string& name : names) result.push_back(name.c_str());
  return result;
}

std::string text_or_empty(const char* text) { return text == nullptr ? std::string() : std::string(text); }

// The range profiler, enabled on a context.
class EnabledProfiler {
 public:
  explicit EnabledProfiler(CUcontext context) {
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_Enable_Params, params);
    params.ctx = context;
    KVONCE_CUPTI_CALL(cuptiRangeProfilerEnable, params);
    profiler_ = params.pRangeProfilerObject;
  }
  ~EnabledProfiler() {
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_Disable_Params, params);
    params.pRangeProfilerObject = profiler_;
    const CUptiResult status = try_call("cuptiRangeProfilerDisable", cuptiRangeProfilerDisable, params);
    if (status != CUPTI_SUCCESS) fmt::print(stderr, "cuptiRangeProfilerDisable: {}\n", status_text(status));
  }
  EnabledProfiler(const EnabledProfiler&) = delete;
  EnabledProfiler& operator=(const EnabledProfiler&) = delete;

  [[nodiscard]] std::vector<std::uint8_t> counter_data(std::vector<const char*> names) const {
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataSize_Params, size);
    size.pRangeProfilerObject = profiler_;
    size.pMetricNames = names.data();
    size.numMetrics = names.size();
    size.maxNumOfRanges = kNumRanges;
    size.maxNumRangeTreeNodes = kNumRanges;
    KVONCE_CUPTI_CALL(cuptiRangeProfilerGetCounterDataSize, size);
    std::vector<std::uint8_t> image(size.counterDataSize);
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_CounterDataImage_Initialize_Params, params);
    params.pRangeProfilerObject = profiler_;
    params.counterDataSize = image.size();
    params.pCounterData = image.data();
    KVONCE_CUPTI_CALL(cuptiRangeProfilerCounterDataImageInitialize, params);
    return image;
  }

  // Both images stay where they are until decode().
  void configure(const std::vector<std::uint8_t>& config, std::vector<std::uint8_t>& counter_data) const {
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_SetConfig_Params, params);
    params.pRangeProfilerObject = profiler_;
    params.configSize = config.size();
    params.pConfig = config.data();
    params.counterDataImageSize = counter_data.size();
    params.pCounterDataImage = counter_data.data();
    params.range = CUPTI_UserRange;
    params.replayMode = CUPTI_UserReplay;
    params.maxRangesPerPass = kNumRanges;
    params.numNestingLevels = 1;
    params.minNestingLevel = 1;
    params.passIndex = 0;
    params.targetNestingLevel = 1;
    KVONCE_CUPTI_CALL(cuptiRangeProfilerSetConfig, params);
  }

  /// One pass; true when it was the last.
  [[nodiscard]] bool pass(const std::function<void()>& counted) const {
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_Start_Params, start);
    start.pRangeProfilerObject = profiler_;
    KVONCE_CUPTI_CALL(cuptiRangeProfilerStart, start);
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_PushRange_Params, push);
    push.pRangeProfilerObject = profiler_;
    push.pRangeName = kRangeName;
    KVONCE_CUPTI_CALL(cuptiRangeProfilerPushRange, push);
    counted();
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_PopRange_Params, pop);
    pop.pRangeProfilerObject = profiler_;
    KVONCE_CUPTI_CALL(cuptiRangeProfilerPopRange, pop);
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_Stop_Params, stop);
    stop.pRangeProfilerObject = profiler_;
    KVONCE_CUPTI_CALL(cuptiRangeProfilerStop, stop);
    return stop.isAllPassSubmitted != 0;
  }

  void decode(const std::vector<std::uint8_t>& counter_data) const {
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_DecodeData_Params, params);
    params.pRangeProfilerObject = profiler_;
    KVONCE_CUPTI_CALL(cuptiRangeProfilerDecodeData, params);
    KVONCE_CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataInfo_Params, info);
    info.pCounterDataImage = counter_data.data();
    info.counterDataImageSize = counter_data.size();
    KVONCE_CUPTI_CALL(cuptiRangeProfilerGetCounterDataInfo, info);
    if (params.numOfRangeDropped != 0 || info.numTotalRanges != kNumRanges) {
      throw Error(ErrorCode::Internal, fmt::format("cuptiRangeProfilerDecodeData: {} ranges and {} dropped, must be {} "
                                                   "and 0",
                                                   info.numTotalRanges, params.numOfRangeDropped, kNumRanges));
    }
  }

 private:
  CUpti_RangeProfiler_Object* profiler_ = nullptr;
};

}  // namespace

void trace_cupti_calls() { traced = true; }

std::string cupti_version() {
  std::uint32_t version = 0;
  const CUptiResult status = cuptiGetVersion(&version);
  return status == CUPTI_SUCCESS ? std::to_string(version) : "unknown, " + status_text(status);
}

CuptiDevice::CuptiDevice(int ordinal) {
  context_ = current_context();
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Initialize_Params, initialize);
  KVONCE_CUPTI_CALL(cuptiProfilerInitialize, initialize);
  report_support(ordinal);
  KVONCE_CUPTI_PARAMS(CUpti_Device_GetChipName_Params, chip);
  chip.deviceIndex = static_cast<std::size_t>(ordinal);
  KVONCE_CUPTI_CALL(cuptiDeviceGetChipName, chip);
  chip_ = text_or_empty(chip.pChipName);
  availability_ = counter_availability(context_);
}

CuptiDevice::~CuptiDevice() {
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_DeInitialize_Params, params);
  (void)try_call("cuptiProfilerDeInitialize", cuptiProfilerDeInitialize, params);
}

Metrics::Metrics(std::string chip, std::vector<std::uint8_t> availability)
    : chip_(std::move(chip)), availability_(std::move(availability)) {
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_Initialize_Params, params);
  params.profilerType = CUPTI_PROFILER_TYPE_RANGE_PROFILER;
  params.pChipName = chip_.c_str();
  params.pCounterAvailabilityImage = availability_.empty() ? nullptr : availability_.data();
  KVONCE_CUPTI_CALL(cuptiProfilerHostInitialize, params);
  host_ = params.pHostObject;
}

Metrics::~Metrics() {
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_Deinitialize_Params, params);
  params.pHostObject = host_;
  (void)try_call("cuptiProfilerHostDeinitialize", cuptiProfilerHostDeinitialize, params);
}

std::optional<MetricInfo> Metrics::describe(const std::string& name) const {
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_GetMetricProperties_Params, params);
  params.pHostObject = host_;
  params.pMetricName = name.c_str();
  if (cuptiProfilerHostGetMetricProperties(&params) != CUPTI_SUCCESS) return std::nullopt;
  return MetricInfo{name, text_or_empty(params.pDimUnit), text_or_empty(params.pHwUnit),
                    text_or_empty(params.pDescription)};
}

std::vector<MetricInfo> Metrics::counters() const {
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_GetBaseMetrics_Params, params);
  params.pHostObject = host_;
  params.metricType = CUPTI_METRIC_TYPE_COUNTER;
  KVONCE_CUPTI_CALL(cuptiProfilerHostGetBaseMetrics, params);
  std::vector<std::string> names;  // a call may reuse CUPTI's list
  names.reserve(params.numMetrics);
  for (std::size_t i = 0; i < params.numMetrics; ++i) names.push_back(text_or_empty(params.ppMetricNames[i]));
  std::vector<MetricInfo> result;
  result.reserve(names.size());
  for (const std::string& name : names) result.push_back(describe(name).value_or(MetricInfo{name, "", "", ""}));
  return result;
}

std::optional<MetricInfo> Metrics::find(const std::string& name) const {
  std::optional<MetricInfo> info = describe(name.substr(0, name.find('.')));
  if (info) info->name = name;
  return info;
}

void Metrics::select(const std::vector<std::string>& names) {
  names_ = names;
  std::vector<const char*> texts = pointers(names_);
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_ConfigAddMetrics_Params, add);
  add.pHostObject = host_;
  add.ppMetricNames = texts.data();
  add.numMetrics = texts.size();
  KVONCE_CUPTI_CALL(cuptiProfilerHostConfigAddMetrics, add);
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImageSize_Params, size);
  size.pHostObject = host_;
  KVONCE_CUPTI_CALL(cuptiProfilerHostGetConfigImageSize, size);
  config_.resize(size.configImageSize);
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImage_Params, image);
  image.pHostObject = host_;
  image.configImageSize = config_.size();
  image.pConfigImage = config_.data();
  KVONCE_CUPTI_CALL(cuptiProfilerHostGetConfigImage, image);
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_GetNumOfPasses_Params, passes);
  passes.configImageSize = config_.size();
  passes.pConfigImage = config_.data();
  KVONCE_CUPTI_CALL(cuptiProfilerHostGetNumOfPasses, passes);
  num_passes_ = passes.numOfPasses;
}

std::vector<double> Metrics::count(const CuptiDevice& device, const std::function<void()>& before,
                                   const std::function<void()>& call_counted) const {
  constexpr std::size_t kPassesToSpare = 4;  // CUPTI may take more than the host counts
  const EnabledProfiler profiler(device.context());
  std::vector<const char*> texts = pointers(names_);
  std::vector<std::uint8_t> counter_data = profiler.counter_data(texts);
  profiler.configure(config_, counter_data);
  bool done = false;
  for (std::size_t pass = 0; !done; ++pass) {
    if (pass == num_passes_ + kPassesToSpare) {
      throw Error(ErrorCode::Internal,
                  fmt::format("cuptiRangeProfilerStop: asks for more passes after {}, the configuration has {}", pass,
                              num_passes_));
    }
    before();
    done = profiler.pass(call_counted);
  }
  profiler.decode(counter_data);
  std::vector<double> values(names_.size());
  KVONCE_CUPTI_PARAMS(CUpti_Profiler_Host_EvaluateToGpuValues_Params, params);
  params.pHostObject = host_;
  params.pCounterDataImage = counter_data.data();
  params.counterDataImageSize = counter_data.size();
  params.rangeIndex = 0;
  params.ppMetricNames = texts.data();
  params.numMetrics = texts.size();
  params.pMetricValues = values.data();
  KVONCE_CUPTI_CALL(cuptiProfilerHostEvaluateToGpuValues, params);
  return values;
}

}  // namespace kvonce::tool
