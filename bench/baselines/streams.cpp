// The arms that only stream: the read loops and the dense matrix-vector product.
#include <algorithm>
#include <atomic>

#include "baselines/baselines.hpp"
#include "shared/token_range.h"

namespace kvonce::bench {
namespace {

constexpr std::int64_t kMinTaskBytes = 64 * 1024;
constexpr std::int64_t kMaxTaskBytes = 2 * 1024 * 1024;
constexpr std::int64_t kTasksPerThread = 16;

// Bytes per task: enough tasks that no thread waits long for the last one, each long enough to stream.
std::int64_t task_bytes(std::int64_t bytes, int num_threads, std::int64_t multiple) {
  const std::int64_t even = bytes / (kTasksPerThread * num_threads);
  return std::max(multiple, std::clamp(even, kMinTaskBytes, kMaxTaskBytes) / multiple * multiple);
}

}  // namespace

std::uint64_t run_read(const ReadLoop& loop, const void* data, std::int64_t bytes, Team team) {
  const std::int64_t whole = bytes / 64 * 64;
  const std::int64_t piece = task_bytes(whole, team.num_threads, 64);
  const auto* const begin = static_cast<const char*>(data);
  std::atomic<std::uint64_t> sum{0};
  team.run(shared::ceil_div(whole, piece), [&](std::int64_t task) {
    const std::int64_t left = whole - task * piece;
    sum ^= loop.run(begin + task * piece, static_cast<std::size_t>(std::min(piece, left)));
  });
  return sum;
}

Qmv::Qmv(const TargetKernels& kernels, std::int64_t matrix_bytes, Team team) : kernels_(kernels), team_(team) {
  const std::int64_t elements = matrix_bytes / 2;
  num_full_rows_ = elements / kCols;
  last_cols_ = elements % kCols / 64 * 64;
  x_.resize(static_cast<std::size_t>(kCols));
  for (std::size_t i = 0; i < x_.size(); ++i) x_[i] = 0.25F + static_cast<float>(i % 7) / 8.0F;
  y_.resize(static_cast<std::size_t>(num_rows()));
}

std::string Qmv::kernel_id() const { return "qmv_" + std::string(kernels_.target) + "_f16"; }

void Qmv::run(const std::uint16_t* matrix) {
  const std::int64_t rows_per_task =
      task_bytes(num_full_rows_ * kCols * 2, team_.num_threads, kCols * 2 * 4) / (kCols * 2);
  const std::int64_t num_full_tasks = shared::ceil_div(num_full_rows_, rows_per_task);
  team_.run(num_full_tasks + (last_cols_ > 0 ? 1 : 0), [&](std::int64_t task) {
    const std::int64_t row = std::min(task * rows_per_task, num_full_rows_);
    const bool last = task == num_full_tasks;
    const std::int64_t rows = last ? 1 : std::min(rows_per_task, num_full_rows_ - row);
    kernels_.qmv({matrix + row * kCols, x_.data(), y_.data() + row, rows, last ? last_cols_ : kCols});
  });
}

}  // namespace kvonce::bench
