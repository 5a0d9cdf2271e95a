// PlanOptions::earlier_kv_ready: the kernel may start under the tail of the one before, but q, the newest token and the
// outputs keep their order.
#include "busy_kernels.hpp"
#include "device_test.hpp"

namespace kvonce::cuda_test {
namespace {

class OrderTest : public DeviceTest {};

TEST_F(OrderTest, AProducerThatWritesLateAndAConsumer) {
  for (const JoinKind& join : join_kinds()) {
    for (const auto& [format, group] :
         {std::pair{KvFormat::bf16, 8}, std::pair{KvFormat::bf16, 24}, std::pair{KvFormat::f32, 8}}) {
      CaseSpec spec = make_case(format, 128, group, 1, 1013);
      join.apply(spec);
      spec.options.earlier_kv_ready = true;
      spec.name += std::string(" ") + join.name;
      const Plan plan = conformance::plan_case(spec, device());
      CaseTensors tensors(spec);
      DeviceCase on_device(plan, spec, tensors);
      auto* const stream = static_cast<cudaStream_t>(on_device.stream());
      on_device.prepare();
      on_device.attend();
      ASSERT_EQ(on_device.fetch(), "") << spec.name;
      ASSERT_EQ(judge_lengths(plan, spec, tensors, spec.kv_lens), "") << spec.name;
      const std::vector<unsigned char> want = tensors.result_bytes();

      // q and the newest rows of K and V wait in a second place; their own is NaN until the producer has written.
      const std::size_t element = format == KvFormat::f32 ? 4 : 2;
      const std::size_t row = 128 * element;
      const DeviceBytes staged(static_cast<std::size_t>(group + 2) * row);
      ASSERT_CUDA(staged.status());
      const Inputs& in = on_device.inputs();
      const auto newest = [&](const TensorView& view) {
        return static_cast<unsigned char*>(const_cast<void*>(view.data)) + 1012 * row;
      };
      const Pieces pieces = {{{const_cast<void*>(in.q.data), staged.data(), group * row},
                              {newest(in.k), staged.data() + group * row, row},
                              {newest(in.v), staged.data() + (group + 1) * row, row}}};
      for (const Piece& piece : pieces.piece) {
        ASSERT_CUDA(
            cudaMemcpyAsync(const_cast<void*>(piece.from), piece.to, piece.bytes, cudaMemcpyDeviceToDevice, stream));
      }
      constexpr int kRepeats = 1000;
      const std::size_t out_bytes = group * 128UL * (spec.problem.out_dtype == DType::f32 ? 4 : 2);
      const DeviceBytes consumed(kRepeats * out_bytes);
      ASSERT_CUDA(consumed.status());
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        for (const Piece& piece : pieces.piece) ASSERT_CUDA(cudaMemsetAsync(piece.to, 0xff, piece.bytes, stream));
        ASSERT_CUDA(write_late(stream, pieces, repeat % 20));
        on_device.attend();
        ASSERT_CUDA(cudaMemcpyAsync(consumed.data() + static_cast<std::size_t>(repeat) * out_bytes,
                                    on_device.outputs().out, out_bytes, cudaMemcpyDeviceToDevice, stream));
      }
      ASSERT_EQ(on_device.fetch(), "") << spec.name;
      ASSERT_EQ(tensors.result_bytes(), want) << spec.name;
      std::vector<unsigned char> all(kRepeats * out_bytes);
      ASSERT_CUDA(cudaMemcpy(all.data(), consumed.data(), all.size(), cudaMemcpyDeviceToHost));
      const auto last = all.end() - static_cast<std::ptrdiff_t>(out_bytes);
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        const auto begin = all.begin() + repeat * static_cast<std::ptrdiff_t>(out_bytes);
        ASSERT_TRUE(std::equal(last, all.end(), begin)) << spec.name << " repeat " << repeat;
      }
      on_device.check();
    }
  }
}

}  // namespace
}  // namespace kvonce::cuda_test
