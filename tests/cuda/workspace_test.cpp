// What a workspace promises: NaN when nobody prepared it, a report of lengths that had to be clamped, no trace of a call.
#include <cmath>

#include "device_test.hpp"

namespace kvonce::cuda_test {
namespace {

class WorkspaceTest : public DeviceTest {
 protected:
  static CaseSpec joined_through_memory(KvFormat format) {
    CaseSpec spec = make_case(format, 128, 8, 2, 1000);
    spec.problem.num_seqs = 2;
    spec.kv_lens = {1000, 900};
    spec.options.policy.cluster = 0;
    spec.options.policy.splits = 8;
    return spec;
  }

  static std::string refusal_of(DeviceCase& on_device) {
    try {
      on_device.check();
    } catch (const Error& error) {
      return error.code() == ErrorCode::InvalidArgument ? error.what() : std::string("another code: ") + error.what();
    }
    return "nothing";
  }
};

TEST_F(WorkspaceTest, OneThatNobodyPreparedGivesNaN) {
  for (const KvFormat format : {KvFormat::bf16, KvFormat::f32}) {
    const CaseSpec spec = joined_through_memory(format);
    const Problem& p = spec.problem;
    const Plan plan = conformance::plan_case(spec, device());
    CaseTensors tensors(spec);
    DeviceCase on_device(plan, spec, tensors);
    // Not 0xff, which is a NaN itself.
    ASSERT_CUDA(cudaMemset(const_cast<void*>(on_device.outputs().out), 0,
                           static_cast<std::size_t>(p.num_seqs * p.num_q_heads * p.dim_v() * 4)));
    ASSERT_CUDA(cudaMemset(on_device.outputs().lse, 0, static_cast<std::size_t>(p.num_seqs * p.num_q_heads * 4)));
    ASSERT_CUDA(cudaDeviceSynchronize());
    on_device.attend();
    ASSERT_EQ(on_device.fetch(), "");
    for (std::int64_t seq = 0; seq < p.num_seqs; ++seq) {
      for (std::int64_t head = 0; head < p.num_q_heads; ++head) {
        ASSERT_TRUE(std::isnan(tensors.lse_value(seq, head, 0))) << "seq " << seq << " head " << head;
        for (std::int64_t dim = 0; dim < p.dim_v(); ++dim) {
          ASSERT_TRUE(std::isnan(tensors.out_value(seq, head, 0, dim))) << "head " << head << " dim " << dim;
        }
      }
    }
    EXPECT_NE(refusal_of(on_device).find("prepare_workspace()"), std::string::npos) << refusal_of(on_device);
    on_device.prepare();
    on_device.attend();
    ASSERT_EQ(on_device.fetch(), "");
    EXPECT_EQ(judge_lengths(plan, spec, tensors, spec.kv_lens), "");
    EXPECT_EQ(refusal_of(on_device), "nothing");
  }
}

TEST_F(WorkspaceTest, LengthsOutOfRangeAreClampedAndReported) {
  for (const JoinKind& join : join_kinds()) {
    for (const KvFormat format : {KvFormat::bf16, KvFormat::f32}) {
      CaseSpec spec = joined_through_memory(format);
      spec.kv_lens = {1000, 1000};
      join.apply(spec);
      const Plan plan = conformance::plan_case(spec, device());
      CaseTensors tensors(spec);
      DeviceCase on_device(plan, spec, tensors);
      on_device.prepare();
      const std::int32_t wrong[] = {1001, -1};
      const std::int32_t worse[] = {INT32_MIN, INT32_MAX};
      for (const std::int32_t* lens : {wrong, worse}) {
        ASSERT_CUDA(put(on_device, on_device.inputs().kv_lens, lens, 8));
        on_device.reset_outputs();
        on_device.attend();
        ASSERT_EQ(on_device.fetch(), "");
        const std::vector<std::int32_t> clamped = {lens[0] < 0 ? 0 : 1000, lens[1] < 0 ? 0 : 1000};
        EXPECT_EQ(judge_lengths(plan, spec, tensors, clamped), "") << join.name;
        const std::string refusal = refusal_of(on_device);
        EXPECT_NE(refusal.find("kv_lens"), std::string::npos) << refusal;
        EXPECT_NE(refusal.find("max_kv_len = 1000"), std::string::npos) << refusal;
      }
      // The report stays until the workspace is prepared again.
      ASSERT_CUDA(put_lengths(on_device, spec.kv_lens));
      on_device.attend();
      EXPECT_NE(refusal_of(on_device), "nothing") << join.name;
      on_device.prepare();
      on_device.attend();
      EXPECT_EQ(refusal_of(on_device), "nothing") << join.name;
    }
  }
}

TEST_F(WorkspaceTest, StartsOutOfRangeAreClamped) {
  CaseSpec spec = joined_through_memory(KvFormat::bf16);
  spec.kv_starts = {0, 0};
  const Plan plan = conformance::plan_case(spec, device());
  CaseTensors tensors(spec);
  DeviceCase on_device(plan, spec, tensors);
  on_device.prepare();
  const std::int32_t starts[] = {-7, 901};
  ASSERT_CUDA(put(on_device, on_device.inputs().kv_starts, starts, 8));
  on_device.attend();
  ASSERT_EQ(on_device.fetch(), "");
  EXPECT_EQ(judge_lengths(plan, spec, tensors, {1000, 0}), "");
}

// A call leaves the workspace as it found it, whatever the lengths of the calls before.
TEST_F(WorkspaceTest, ServesCallsOfAnyLengthsInTurn) {
  for (const JoinKind& join : join_kinds()) {
    CaseSpec spec = joined_through_memory(KvFormat::bf16);
    spec.kv_lens = {1000, 1000};
    join.apply(spec);
    const Plan plan = conformance::plan_case(spec, device());
    CaseTensors tensors(spec);
    DeviceCase on_device(plan, spec, tensors);
    on_device.prepare();
    for (int call = 0; call < 60; ++call) {
      const std::vector<std::int32_t> kv_lens = {call * 397 % 1001, call * 211 % 1001};
      ASSERT_CUDA(put_lengths(on_device, kv_lens));
      on_device.reset_outputs();
      on_device.attend();
      ASSERT_EQ(on_device.fetch(), "") << join.name << " call " << call;
      ASSERT_EQ(judge_lengths(plan, spec, tensors, kv_lens), "") << join.name << " call " << call;
    }
    on_device.check();
  }
}

// A plan for a long cache at short lengths, plain decode: up to 16 splits are joined by lanes, more otherwise, and one not at all.
TEST_F(WorkspaceTest, ALongPlanServesShortLengthsInTurn) {
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int64_t group : {1, 3, 8}) {
      for (const std::int64_t join_blocks : {0, 3}) {
        CaseSpec spec = make_case(KvFormat::bf16, dim, group, 2, 12000);
        spec.problem.out_dtype = DType::bf16;
        spec.options.policy.cluster = 0;
        spec.options.policy.splits = 20;
        spec.options.policy.join_blocks = join_blocks;
        const Plan plan = conformance::plan_case(spec, device());
        CaseTensors tensors(spec);
        DeviceCase on_device(plan, spec, tensors);
        const std::int64_t heads = spec.problem.num_q_heads;
        ASSERT_CUDA(
            cudaMemset(const_cast<void*>(on_device.outputs().out), 0, static_cast<std::size_t>(heads * dim * 2)));
        ASSERT_CUDA(cudaMemset(on_device.outputs().lse, 0, static_cast<std::size_t>(heads * 4)));
        ASSERT_CUDA(cudaDeviceSynchronize());
        std::vector<std::int32_t> kv_lens = {1000};
        ASSERT_CUDA(put_lengths(on_device, kv_lens));
        on_device.attend();
        ASSERT_EQ(on_device.fetch(), "");
        for (std::int64_t head = 0; head < heads; ++head) {
          ASSERT_TRUE(std::isnan(tensors.lse_value(0, head, 0))) << spec.name << " head " << head;
          ASSERT_TRUE(std::isnan(tensors.out_value(0, head, 0, dim - 1))) << spec.name << " head " << head;
        }
        on_device.prepare();
        for (const std::int32_t kv_len :
             {1000, 1, 128, 129, 2048, 0, 700, 2049, 2560, 300, 12000, 1921, 2047, 17, 257, 2048}) {
          kv_lens = {kv_len};
          ASSERT_CUDA(put_lengths(on_device, kv_lens));
          on_device.reset_outputs();
          on_device.attend();
          ASSERT_EQ(on_device.fetch(), "") << spec.name << " kv_len " << kv_len;
          ASSERT_EQ(judge_lengths(plan, spec, tensors, kv_lens), "") << spec.name << " kv_len " << kv_len;
        }
        on_device.check();
      }
    }
  }
}

TEST_F(WorkspaceTest, OneByteLessIsRefused) {
  const CaseSpec spec = joined_through_memory(KvFormat::bf16);
  const Plan plan = conformance::plan_case(spec, device());
  CaseTensors tensors(spec);
  DeviceCase on_device(plan, spec, tensors);
  Context context;
  context.cuda_stream = on_device.stream();
  const std::size_t less = plan.workspace_bytes() - 1;
  EXPECT_THROW(attend(plan, on_device.inputs(), on_device.outputs(), on_device.workspace(), less, context), Error);
  EXPECT_THROW(prepare_workspace(plan, on_device.workspace(), less, context), Error);
  EXPECT_THROW(check_workspace(plan, on_device.workspace(), less, context), Error);
  EXPECT_THROW(attend(plan, on_device.inputs(), on_device.outputs(), nullptr, less + 1, context), Error);
}

}  // namespace
}  // namespace kvonce::cuda_test
