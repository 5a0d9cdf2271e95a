// The arms of one case on a CUDA device.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvonce/bench_cuda_device.hpp"
#include "kvonce/bench_data.hpp"
#include "kvonce/bench_rows.hpp"
#include "kvonce/bench_run.hpp"
#include "kvonce/kvonce.hpp"

namespace kvonce::tool {

/// A case on the device, and beside it what results are compared with.
struct CudaCase {
  const CaseData* host = nullptr;  // its base is a copy of set 0 in host memory
  char* base = nullptr;            // device memory: all sets
  DeviceMemory q;

  [[nodiscard]] Inputs inputs(std::int64_t set) const;
  [[nodiscard]] const char* set_data(std::int64_t set) const { return base + set * host->set_bytes; }
};

/// What a run of an arm on set 0 gave.
struct CudaFinding {
  std::optional<double> rel_rms_error;  // absent for read and floor
  std::string wrong;                    // empty when right
};

struct CudaArm {
  ArmLabel label;
  std::function<void(std::int64_t set)> enqueue;  // on the stream; may be captured
  std::function<CudaFinding()> check;             // runs on set 0, waits and compares
  std::optional<std::int64_t> planned_kv_len;     // of the arms with the lengths in device memory

  // Of the arms of kvonce: where the result is, and what of it the oracle says.
  char* out = nullptr;
  std::size_t out_bytes = 0;
  std::function<CudaFinding()> judge_out;
};

/// Throws Error{Unsupported, ...} when the arm cannot serve the problem. Touches no device.
void require_servable(std::string_view name, const Problem& problem, const BenchSettings& settings);

/// The forms of an arm of which the fastest is reported: one for most. `on_device` and `stream` outlive them.
std::vector<CudaArm> make_cuda_arms(std::string_view name, const CudaCase& on_device, const BenchSettings& settings,
                                    const CudaStream& stream);

}  // namespace kvonce::tool
