// Hardware counters by CUPTI's range profiler: which there are (host API, needs no device) and what a call costs in them.
// Every call of CUPTI is checked; one that fails is an Error{Unavailable} that names it and its status.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

struct CUpti_Profiler_Host_Object;

namespace kvonce::tool {

/// From now on every call of CUPTI is named on standard error before and after it runs.
void trace_cupti_calls();

std::string cupti_version();

/// The profiler of this process on one device, whose context is current and stays alive.
class CuptiDevice {
 public:
  /// Goes on where the device says that it allows no profiling, after a line on standard error: count() fails then.
  explicit CuptiDevice(int ordinal);
  ~CuptiDevice();
  CuptiDevice(const CuptiDevice&) = delete;
  CuptiDevice& operator=(const CuptiDevice&) = delete;

  [[nodiscard]] const std::string& chip() const noexcept { return chip_; }
  [[nodiscard]] CUcontext context() const noexcept { return context_; }
  /// What of the chip's counters this device lends, for Metrics; may be empty.
  [[nodiscard]] const std::vector<std::uint8_t>& availability() const noexcept { return availability_; }

 private:
  std::string chip_;
  CUcontext context_ = nullptr;
  std::vector<std::uint8_t> availability_;
};

struct MetricInfo {
  std::string name;
  std::string unit;     // "byte", "l2_sector", ...
  std::string counted;  // the part of the chip that counts: "dram", "lts", "l1tex", ...
  std::string description;
};

/// The metrics of a chip, and those of them that are selected for counting.
class Metrics {
 public:
  /// chip: as "GH100". availability: of the device, empty for a chip that is not here.
  explicit Metrics(std::string chip, std::vector<std::uint8_t> availability = {});
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  [[nodiscard]] const std::string& chip() const noexcept { return chip_; }

  /// The counters, without the rollups (".sum") that a selection needs.
  [[nodiscard]] std::vector<MetricInfo> counters() const;
  /// Nothing where the chip has no such counter; `name` with or without its rollup.
  [[nodiscard]] std::optional<MetricInfo> find(const std::string& name) const;

  /// Once, before the rest. Names with their rollup.
  void select(const std::vector<std::string>& names);
  [[nodiscard]] const std::vector<std::string>& selected() const noexcept { return names_; }
  [[nodiscard]] std::size_t num_passes() const noexcept { return num_passes_; }

  /// The selected metrics of what `call` puts on the device and waits for; `before` runs ahead of every pass and does not
  /// count. The calls must do the same in every pass.
  [[nodiscard]] std::vector<double> count(const CuptiDevice& device, const std::function<void()>& before,
                                          const std::function<void()>& call) const;

 private:
  [[nodiscard]] std::optional<MetricInfo> describe(const std::string& name) const;

  std::string chip_;
  std::vector<std::uint8_t> availability_;
  CUpti_Profiler_Host_Object* host_ = nullptr;
  std::vector<std::string> names_;
  std::vector<std::uint8_t> config_;  // how the selected counters are spread over passes
  std::size_t num_passes_ = 0;
};

}  // namespace kvonce::tool
