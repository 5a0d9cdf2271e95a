// One captured call serves every length up to the planned maximum.
#include <algorithm>

#include "device_test.hpp"

namespace kvonce::cuda_test {
namespace {

class GraphTest : public DeviceTest {
 protected:
  static constexpr std::int32_t kMaxLen = 2048;

  static CaseSpec two_sequences(KvFormat format, std::int64_t q_len) {
    CaseSpec spec = make_case(format, 128, 8, 2, kMaxLen, q_len);
    spec.problem.num_seqs = 2;
    spec.kv_lens = {kMaxLen, kMaxLen};  // every token exists; the device's lengths change
    return spec;
  }
};

class Graph {
 public:
  ~Graph() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  cudaError_t capture(DeviceCase& on_device, int calls) {
    auto* const stream = static_cast<cudaStream_t>(on_device.stream());
    cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (status != cudaSuccess) return status;
    for (int call = 0; call < calls; ++call) on_device.attend();
    status = cudaStreamEndCapture(stream, &graph_);
    return status == cudaSuccess ? cudaGraphInstantiate(&exec_, graph_, 0) : status;
  }
  cudaError_t replay(DeviceCase& on_device) {
    return cudaGraphLaunch(exec_, static_cast<cudaStream_t>(on_device.stream()));
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

TEST_F(GraphTest, ReplaysWithOtherLengths) {
  for (const KvFormat format : {KvFormat::bf16, KvFormat::f32}) {
    for (const std::int64_t q_len : {1, 4}) {
      for (const JoinKind& join : join_kinds()) {
        CaseSpec spec = two_sequences(format, q_len);
        join.apply(spec);
        const Plan plan = conformance::plan_case(spec, device());
        CaseTensors tensors(spec);
        DeviceCase replayed(plan, spec, tensors);
        replayed.prepare();
        Graph graph;
        ASSERT_CUDA(graph.capture(replayed, 1));
        CaseTensors fresh_tensors(spec);
        for (const std::int32_t kv_len : {1, 2, 15, 16, 17, 63, 65, 128, 129, 0, 1000, 1001, 2047, 2048, 3, 0, 700}) {
          const std::vector<std::int32_t> kv_lens = {kv_len, (kMaxLen - kv_len) / 3};
          ASSERT_CUDA(put_lengths(replayed, kv_lens));
          replayed.reset_outputs();
          ASSERT_CUDA(graph.replay(replayed));
          replayed.check();
          ASSERT_EQ(replayed.fetch(), "") << join.name << " kv_len " << kv_len;
          EXPECT_EQ(judge_lengths(plan, spec, tensors, kv_lens), "")
              << spec.name << ' ' << join.name << " kv_len " << kv_len;

          DeviceCase fresh(plan, spec, fresh_tensors);
          ASSERT_CUDA(put_lengths(fresh, kv_lens));
          fresh.prepare();
          fresh.attend();
          ASSERT_EQ(fresh.fetch(), "");
          EXPECT_EQ(tensors.result_bytes(), fresh_tensors.result_bytes())
              << spec.name << ' ' << join.name << " kv_len " << kv_len;
        }
      }
    }
  }
}

// As a decoding loop does it: every length once, two layers' calls in one graph.
TEST_F(GraphTest, ACacheThatGrowsTokenByToken) {
  for (const JoinKind& join : {join_kinds()[0], join_kinds()[4]}) {
    CaseSpec spec = two_sequences(KvFormat::bf16, 1);
    spec.problem.max_kv_len = 300;
    spec.kv_lens = {300, 300};
    join.apply(spec);
    const Plan plan = conformance::plan_case(spec, device());
    CaseTensors tensors(spec);
    DeviceCase on_device(plan, spec, tensors);
    on_device.prepare();
    Graph graph;
    ASSERT_CUDA(graph.capture(on_device, 2));
    for (std::int32_t kv_len = 0; kv_len <= 300; ++kv_len) {
      const std::vector<std::int32_t> kv_lens = {kv_len, 300 - kv_len};
      ASSERT_CUDA(put_lengths(on_device, kv_lens));
      on_device.reset_outputs();
      ASSERT_CUDA(graph.replay(on_device));
      ASSERT_EQ(on_device.fetch(), "") << join.name << " kv_len " << kv_len;
      ASSERT_EQ(judge_lengths(plan, spec, tensors, kv_lens), "") << join.name << " kv_len " << kv_len;
    }
    on_device.check();
  }
}

TEST_F(GraphTest, ReplaysWithOtherData) {
  CaseSpec spec = two_sequences(KvFormat::bf16, 1);
  const Plan plan = conformance::plan_case(spec, device());
  CaseTensors tensors(spec);
  DeviceCase on_device(plan, spec, tensors);
  on_device.prepare();
  Graph graph;
  ASSERT_CUDA(graph.capture(on_device, 1));
  for (const int places : {0, 1, 64, 8 * 128}) {
    // q rotated by some elements: other data, still within the tolerance's bound.
    auto* const q = static_cast<std::uint16_t*>(const_cast<void*>(tensors.inputs().q.data));
    std::rotate(q, q + places, q + 2 * 16 * 128);
    on_device.upload();
    on_device.reset_outputs();
    ASSERT_CUDA(graph.replay(on_device));
    ASSERT_EQ(on_device.fetch(), "");
    EXPECT_EQ(judge_lengths(plan, spec, tensors, spec.kv_lens), "") << "rotated by " << places;
  }
}

}  // namespace
}  // namespace kvonce::cuda_test
