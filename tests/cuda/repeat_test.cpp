// The same bits every time: while another stream loads the memory, when most multiprocessors are taken, beside other
// calls in other streams, and from several threads of the host.
#include <memory>
#include <thread>

#include "busy_kernels.hpp"
#include "device_test.hpp"

namespace kvonce::cuda_test {
namespace {

class RepeatTest : public DeviceTest {
 protected:
  static std::vector<CaseSpec> cases() {
    std::vector<CaseSpec> specs;
    for (const JoinKind& join : join_kinds()) {
      CaseSpec spec = make_case(KvFormat::bf16, 128, 8, 4, 8000);
      spec.problem.num_seqs = 2;
      spec.kv_lens = {8000, 777};
      join.apply(spec);
      spec.name += std::string(" ") + join.name;
      specs.push_back(spec);
    }
    CaseSpec generic = make_case(KvFormat::f32, 128, 4, 2, 3000, 2);
    generic.options.policy.cluster = 0;
    specs.push_back(generic);
    return specs;
  }
};

TEST_F(RepeatTest, AThousandTimesTheSameBitsBesideAStreamThatLoadsTheMemory) {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  const Stream busy;
  ASSERT_CUDA(busy.status());
  const DeviceBytes memory(kBytes + 16);
  ASSERT_CUDA(memory.status());
  ASSERT_CUDA(cudaMemset(memory.data(), 1, kBytes));
  for (const CaseSpec& spec : cases()) {
    const Plan plan = conformance::plan_case(spec, device());
    CaseTensors tensors(spec);
    DeviceCase on_device(plan, spec, tensors);
    on_device.prepare();
    std::vector<unsigned char> first;
    for (int repeat = 0; repeat < 1000; ++repeat) {
      // On half of the multiprocessors, beside the call, and on all of them, before and after it.
      if (cudaStreamQuery(busy.get()) == cudaSuccess) {
        for (const int blocks : {device().num_sms / 2, 4 * device().num_sms}) {
          ASSERT_CUDA(read_memory(busy.get(), blocks, memory.data(), kBytes,
                                  reinterpret_cast<std::uint32_t*>(memory.data() + kBytes)));
        }
      }
      on_device.reset_outputs();
      on_device.attend();
      ASSERT_EQ(on_device.fetch(), "") << spec.name << " repeat " << repeat;
      if (repeat == 0) {
        first = tensors.result_bytes();
        ASSERT_EQ(judge_lengths(plan, spec, tensors, spec.kv_lens), "") << spec.name;
      }
      ASSERT_EQ(tensors.result_bytes(), first) << spec.name << " repeat " << repeat;
    }
    on_device.check();
  }
  conformance::wait_for_stream(busy.get(), "read_memory");
}

// Few places are left for the blocks of one call, so most start when others have ended: none may wait for one of them.
TEST_F(RepeatTest, FinishesWhereMostMultiprocessorsAreTaken) {
  const Stream busy;
  ASSERT_CUDA(busy.status());
  for (const CaseSpec& spec : cases()) {
    const std::vector<unsigned char> alone = result_bytes(spec);
    const Plan plan = conformance::plan_case(spec, device());
    CaseTensors tensors(spec);
    DeviceCase on_device(plan, spec, tensors);
    on_device.prepare();
    on_device.wait();
    for (const int left : {1, 2, 5, 20}) {
      for (int repeat = 0; repeat < 10; ++repeat) {
        ASSERT_CUDA(hold_multiprocessors(busy.get(), device().num_sms - left, 3000));
        on_device.reset_outputs();
        for (int call = 0; call < 3; ++call) on_device.attend();
        ASSERT_EQ(on_device.fetch(), "") << spec.name << " with " << left << " multiprocessors left";
        ASSERT_EQ(tensors.result_bytes(), alone) << spec.name << " with " << left << " multiprocessors left";
        conformance::wait_for_stream(busy.get(), "hold_multiprocessors");
      }
    }
  }
}

// The same beside a kernel that does not end before the calls have: a block that waited in one of the few places for one that
// needs it would wait forever.
TEST_F(RepeatTest, FinishesBesideAKernelThatWaitsForIt) {
  const Stream busy;
  ASSERT_CUDA(busy.status());
  const DeviceBytes words(2 * sizeof(std::uint32_t));
  ASSERT_CUDA(words.status());
  auto* const released = reinterpret_cast<std::uint32_t*>(words.data());
  for (const CaseSpec& spec : cases()) {
    const std::vector<unsigned char> alone = result_bytes(spec);
    const Plan plan = conformance::plan_case(spec, device());
    if (plan.policy().cluster > 0) continue;  // starts as a whole or not at all, and holds no place before
    CaseTensors tensors(spec);
    const Stream stream;
    ASSERT_CUDA(stream.status());
    DeviceCase on_device(plan, spec, tensors, stream.get());
    on_device.prepare();
    on_device.wait();
    for (const int left : {1, 2, 5, 20}) {
      ASSERT_CUDA(cudaMemsetAsync(released, 0, 2 * sizeof(std::uint32_t), busy.get()));
      ASSERT_CUDA(hold_until_released(busy.get(), device().num_sms - left, 3000000, released));
      on_device.reset_outputs();
      for (int call = 0; call < 3; ++call) on_device.attend();
      ASSERT_CUDA(cudaMemsetAsync(released, 1, sizeof(std::uint32_t), stream.get()));
      ASSERT_EQ(on_device.fetch(), "") << spec.name << " with " << left << " multiprocessors left";
      ASSERT_EQ(tensors.result_bytes(), alone) << spec.name << " with " << left << " multiprocessors left";
      conformance::wait_for_stream(busy.get(), "hold_until_released");
      std::uint32_t late = 0;
      ASSERT_CUDA(cudaMemcpy(&late, released + 1, sizeof late, cudaMemcpyDeviceToHost));
      ASSERT_EQ(late, 0U) << spec.name << " ended only when the other kernel had, with " << left
                          << " multiprocessors left";
    }
  }
}

TEST_F(RepeatTest, TwoStreamsWithTwoWorkspacesAtOnce) {
  const Stream streams[2];
  for (const Stream& stream : streams) ASSERT_CUDA(stream.status());
  const std::vector<CaseSpec> specs = cases();
  for (std::size_t other = 0; other < specs.size(); ++other) {
    const CaseSpec* const pair[2] = {&specs[2], &specs[other]};
    const std::vector<unsigned char> alone[2] = {result_bytes(*pair[0]), result_bytes(*pair[1])};
    const Plan plans[2] = {conformance::plan_case(*pair[0], device()), conformance::plan_case(*pair[1], device())};
    CaseTensors tensors[2] = {CaseTensors(*pair[0]), CaseTensors(*pair[1])};
    DeviceCase first(plans[0], *pair[0], tensors[0], streams[0].get());
    DeviceCase second(plans[1], *pair[1], tensors[1], streams[1].get());
    DeviceCase* const both[2] = {&first, &second};
    for (DeviceCase* one : both) one->prepare();
    for (int round = 0; round < 20; ++round) {
      for (DeviceCase* one : both) one->reset_outputs();
      for (int call = 0; call < 20; ++call) {
        for (DeviceCase* one : both) one->attend();
      }
      for (int i = 0; i < 2; ++i) {
        ASSERT_EQ(both[i]->fetch(), "") << pair[i]->name;
        ASSERT_EQ(tensors[i].result_bytes(), alone[i]) << pair[i]->name << " beside " << pair[1 - i]->name;
      }
    }
  }
}

TEST_F(RepeatTest, OnePlanFromSeveralThreads) {
  constexpr std::size_t kThreads = 4;
  const CaseSpec spec = cases()[4];
  const std::vector<unsigned char> alone = result_bytes(spec);
  const Plan plan = conformance::plan_case(spec, device());
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<CaseTensors>> tensors;
  std::vector<std::unique_ptr<DeviceCase>> cases_on_device;
  for (std::size_t i = 0; i < kThreads; ++i) {
    streams.push_back(std::make_unique<Stream>());
    ASSERT_CUDA(streams.back()->status());
    tensors.push_back(std::make_unique<CaseTensors>(spec));
    cases_on_device.push_back(std::make_unique<DeviceCase>(plan, spec, *tensors.back(), streams.back()->get()));
  }
  std::vector<std::string> errors(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      try {
        cases_on_device[i]->prepare();
        for (int call = 0; call < 200; ++call) cases_on_device[i]->attend();
        if (cudaStreamSynchronize(streams[i]->get()) != cudaSuccess) errors[i] = "the stream failed";
      } catch (const Error& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < kThreads; ++i) {
    ASSERT_EQ(errors[i], "");
    ASSERT_EQ(cases_on_device[i]->fetch(), "");
    EXPECT_EQ(tensors[i]->result_bytes(), alone);
  }
}

}  // namespace
}  // namespace kvonce::cuda_test
