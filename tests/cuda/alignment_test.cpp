// Bases and strides that are no multiples of 16 bytes go to the other kernel, correctly and without a fault.
#include "device_test.hpp"

namespace kvonce::cuda_test {
namespace {

class AlignmentTest : public DeviceTest {};

// Where K, V or q is not aligned the tolerance is that of float32 probabilities (weight_roundoff), which the tensor-core
// kernel does not reach.
TEST_F(AlignmentTest, AnyBase) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
    const std::int64_t size = format == KvFormat::f32 ? 4 : 2;
    for (std::int64_t offset = 0; offset <= 16; offset += size) {
      for (int which = 0; which < 4; ++which) {
        CaseSpec spec = make_case(format, 128, 5, 2, 333, 2);
        spec.problem.out_dtype = static_cast<DType>(format);
        conformance::TensorLayout* const layouts[] = {&spec.q, &spec.k, &spec.v, &spec.out};
        for (conformance::TensorLayout* layout : layouts) layout->offset_bytes = 0;
        layouts[which]->offset_bytes = offset;
        spec.name += " tensor " + std::to_string(which) + " offset " + std::to_string(offset);
        expect_oracle(spec);
      }
    }
  }
}

TEST_F(AlignmentTest, AnyPitch) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
    for (const std::int64_t gap : {0, 1, 2, 3, 4, 8}) {
      for (int which = 0; which < 4; ++which) {
        for (const bool token_major : {false, true}) {
          CaseSpec spec = make_case(format, 64, 8, 3, 257, 2);
          conformance::TensorLayout* const layouts[] = {&spec.q, &spec.k, &spec.v, &spec.out};
          for (conformance::TensorLayout* layout : layouts) {
            layout->offset_bytes = 0;
            layout->token_major = token_major;
          }
          layouts[which]->row_gap = gap;
          spec.name += " tensor " + std::to_string(which) + " gap " + std::to_string(gap);
          expect_oracle(spec);
        }
      }
    }
  }
}

// The place and pitch of out decide how it is stored, not what.
TEST_F(AlignmentTest, WhereOutStandsChangesNoBit) {
  for (const DType out : {DType::f32, DType::f16, DType::bf16}) {
    CaseSpec spec = make_case(KvFormat::bf16, 128, 8, 2, 500, 2);
    spec.problem.out_dtype = out;
    spec.out.offset_bytes = 0;
    const std::vector<unsigned char> plain = result_bytes(spec);
    for (const std::int64_t offset : {4, 8, 12}) {
      for (const std::int64_t gap : {0, 1, 4}) {
        spec.out.offset_bytes = offset;
        spec.out.row_gap = gap;
        EXPECT_EQ(result_bytes(spec), plain) << "offset " << offset << " gap " << gap;
      }
    }
  }
}

// One plan, one workspace: the kernels for aligned and other tensors leave it as they find it.
TEST_F(AlignmentTest, BothKernelsShareAWorkspace) {
  for (const JoinKind& join : join_kinds()) {
    CaseSpec aligned = make_case(KvFormat::bf16, 128, 8, 2, 1500);
    join.apply(aligned);
    CaseSpec shifted = aligned;
    for (conformance::TensorLayout* layout : {&aligned.q, &aligned.k, &aligned.v}) layout->offset_bytes = 0;
    for (conformance::TensorLayout* layout : {&shifted.q, &shifted.k, &shifted.v}) layout->offset_bytes = 4;
    const Plan plan = conformance::plan_case(aligned, device());
    CaseTensors aligned_tensors(aligned);
    CaseTensors shifted_tensors(shifted);
    DeviceCase one(plan, aligned, aligned_tensors);
    DeviceCase other(plan, shifted, shifted_tensors);
    one.prepare();
    Context context;
    context.cuda_stream = one.stream();
    for (int round = 0; round < 5; ++round) {
      one.reset_outputs();
      other.reset_outputs();
      one.attend();
      attend(plan, other.inputs(), other.outputs(), one.workspace(), plan.workspace_bytes(), context);
      one.check();
      ASSERT_EQ(one.fetch(), "") << join.name;
      ASSERT_EQ(other.fetch(), "") << join.name;
      ASSERT_EQ(judge_lengths(plan, aligned, aligned_tensors, aligned.kv_lens), "") << join.name;
      ASSERT_EQ(judge_lengths(plan, shifted, shifted_tensors, shifted.kv_lens), "") << join.name;
    }
  }
}

}  // namespace
}  // namespace kvonce::cuda_test
