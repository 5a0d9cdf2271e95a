#include "run_launch.hpp"

#include <cstring>

#include "guarded_buffer.hpp"
#include "kernels.hpp"

namespace kvonce::emulation {
namespace {

using conformance::GuardedBuffer;

GuardedBuffer nan_buffer(std::int64_t bytes) {
  GuardedBuffer buffer(static_cast<std::size_t>(bytes), GuardedBuffer::Place::kFlushEnd);
  buffer.fill_byte(0xff);
  return buffer;
}

// A threadgroup of one of the two kernels.
struct ThreadgroupRun {
  RunAttend attend;
  const AttendArgs* attend_args;
  RunMerge merge;
  const MergeArgs* merge_args;
  float* shared;
  ThreadPlace place;
};

void run_thread(void* context, int simdgroup, int lane) {
  const auto& run = *static_cast<const ThreadgroupRun*>(context);
  ThreadPlace place = run.place;
  place.simdgroup = simdgroup;
  place.lane = lane;
  if (run.attend != nullptr) {
    run.attend(*run.attend_args, run.shared, place);
  } else {
    run.merge(*run.merge_args, run.shared, place);
  }
}

}  // namespace

std::string run_launch(const Launch& launch, const Inputs& inputs, std::uint64_t order_seed, void* out, float* lse,
                       Counts* attend_counts, std::span<const Region>) {
  const std::int64_t num_chunks = launch.num_chunks();
  const std::int64_t dim_v = launch.instance.head_dim_v;
  const RunAttend attend = attend_kernel(launch.instance);
  const RunMerge merge = merge_kernel(launch.instance.dtype, launch.instance.head_dim_v);
  GuardedBuffer partial_o = nan_buffer(launch.num_rows * num_chunks * dim_v * 4);
  GuardedBuffer partial_sums = nan_buffer(launch.num_rows * num_chunks * 8);
  GuardedBuffer shared = nan_buffer(launch.shared_floats * 4);
  GuardedBuffer merge_shared = nan_buffer(launch.merge_shared_floats * 4);
  const AttendArgs attend_args{inputs.q.data,
                               inputs.k.data,
                               inputs.v.data,
                               inputs.kv_lens,
                               inputs.kv_starts,
                               static_cast<const unsigned char*>(inputs.mask),
                               inputs.alibi_slopes,
                               launch.params.data(),
                               launch.scalars.data(),
                               launch.strides[0].data(),
                               launch.strides[1].data(),
                               launch.strides[2].data(),
                               launch.strides[3].data(),
                               reinterpret_cast<float*>(partial_o.data()),
                               reinterpret_cast<float*>(partial_sums.data()),
                               inputs.k_scales.data,
                               inputs.k_biases.data,
                               inputs.v_scales.data,
                               inputs.v_biases.data,
                               launch.strides[4].data(),
                               launch.strides[5].data(),
                               launch.strides[6].data(),
                               launch.strides[7].data()};
  reset_counts();
  ThreadgroupRun run{attend, &attend_args, nullptr, nullptr, reinterpret_cast<float*>(shared.data()), {}};
  for (std::int64_t z = 0; z < launch.grid_z; ++z) {
    for (std::int64_t y = 0; y < launch.grid_y; ++y) {
      for (std::int64_t x = 0; x < launch.grid_x; ++x) {
        shared.fill_byte(0xff);
        run.place = {static_cast<int>(x), static_cast<int>(y), static_cast<int>(z), 0, 0};
        run_threadgroup(static_cast<int>(launch.num_simdgroups), order_seed++, run_thread, &run);
      }
    }
  }
  if (attend_counts != nullptr) *attend_counts = counts();
  // Every partial has been written: no NaN of 0xff bytes is left.
  for (std::int64_t i = 0; i < launch.num_rows * num_chunks * 2; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, attend_args.partial_sums + i, 4);
    if (bits == 0xffffffffU) return "partial " + std::to_string(i / 2) + " was not written";
  }
  const MergeArgs merge_args{
      attend_args.partial_o, attend_args.partial_sums, inputs.sinks, launch.params.data(), out, lse};
  run = {nullptr, nullptr, merge, &merge_args, reinterpret_cast<float*>(merge_shared.data()), {}};
  for (std::int64_t row = 0; row < launch.num_rows; ++row) {
    merge_shared.fill_byte(0xff);
    run.place = {static_cast<int>(row), 0, 0, 0, 0};
    run_threadgroup(static_cast<int>(launch.merge_simdgroups), order_seed++, run_thread, &run);
  }
  for (const GuardedBuffer* buffer : {&partial_o, &partial_sums, &shared, &merge_shared}) {
    if (!buffer->margins_are(0xff)) return "bytes before a scratch buffer were written";
  }
  return {};
}

}  // namespace kvonce::emulation
