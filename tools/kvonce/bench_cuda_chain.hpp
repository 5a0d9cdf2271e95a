// Attention between two neighbours, as in a model: what `kvonce bench --chain` times.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>

#include "baselines/cuda/neighbours.hpp"
#include "kvonce/bench_cuda_arms.hpp"

namespace kvonce::tool {

using bench::cuda::NeighbourForm;

inline constexpr std::array kNeighbourForms = {NeighbourForm::plain, NeighbourForm::late, NeighbourForm::early};
std::string_view form_name(NeighbourForm form);

/// The neighbours of one case. The producer writes q and the newest rows of K and V of a set from copies of the case's q and
/// of set 0's rows, so that set 0 is what the oracle saw once it has run.
class ChainNeighbours {
 public:
  /// Both outlive it. `on_device` is in place: its host data too.
  ChainNeighbours(const CudaCase& on_device, const CudaStream& stream);

  /// Producer, attention, consumer. Its check sets the result, q and the newest rows of several sets to NaN, runs the chain
  /// over these sets and compares the last result with the oracle, and what the consumer left with the result.
  [[nodiscard]] CudaArm around(const CudaArm& attention, NeighbourForm form) const;
  /// Producer, consumer; the consumer reads the result of `attention`, whatever it is. No check.
  [[nodiscard]] CudaArm without(const CudaArm& attention, NeighbourForm form) const;

 private:
  [[nodiscard]] bench::cuda::Produced produced(std::int64_t set) const;
  void produce(std::int64_t set, NeighbourForm form) const;
  void consume(const CudaArm& attention, NeighbourForm form) const;
  [[nodiscard]] CudaFinding check(const CudaArm& attention, const std::function<void(std::int64_t)>& enqueue) const;

  const CudaCase& on_device_;
  const CudaStream& stream_;
  DeviceMemory q_;
  DeviceMemory k_rows_;
  DeviceMemory v_rows_;
  DeviceMemory nan_;  // as many bytes as the largest of the three
  DeviceMemory consumed_;
};

}  // namespace kvonce::tool
