// Offsets beyond 2^31 elements and contexts of millions of tokens, in virtual memory that is mostly unmapped: an offset
// that loses bits faults or reads something else.
#include <cmath>
#include <cstdlib>
#include <list>
#include <memory>

#include "device_test.hpp"
#include "shared/numeric.h"
#include "sparse_memory.hpp"

namespace kvonce::cuda_test {
namespace {

class SparseTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped()) return;
    driver_ = std::make_unique<Driver>();
    if (!driver_->missing().empty()) GTEST_SKIP() << "not run: the driver lacks" << driver_->missing();
  }

  // A tensor in sparse memory with the rows of a packed one, each granule backed by memory of its own where a row stands.
  class SparseTensor {
   public:
    SparseTensor(const Driver& driver, std::size_t bytes) : driver_(driver), memory_(driver, bytes) {}

    // Backs where `bytes` from `offset` on stand.
    void back(std::int64_t offset, std::int64_t bytes) {
      const auto granule = static_cast<std::int64_t>(driver_.granule);
      for (std::int64_t at = offset / granule * granule; at < offset + bytes; at += granule) {
        if (memory_.is_backed(static_cast<std::size_t>(at))) continue;
        chunks_.emplace_back(driver_, driver_.granule);
        ASSERT_TRUE(chunks_.back().valid()) << "no device memory";
        ASSERT_TRUE(memory_.back(static_cast<std::size_t>(at), chunks_.back())) << "no mapping at " << at;
        ASSERT_CUDA(cudaMemset(memory_.data() + at, 0xff, driver_.granule));
      }
    }
    [[nodiscard]] bool valid() const { return memory_.valid(); }
    [[nodiscard]] unsigned char* data() const { return memory_.data(); }

   private:
    const Driver& driver_;
    std::list<Chunk> chunks_;  // released after the memory is unmapped
    SparseMemory memory_;
  };

  std::unique_ptr<Driver> driver_;
};

struct Strides {
  const char* name;
  std::int64_t seqs, heads, tokens;
  std::int64_t seq, head, token;
};

// Calls body(packed offset, sparse offset), in elements, for each row of a [seqs, heads, tokens, dim] tensor.
template <typename Body>
void for_each_row(const Strides& packed, const Strides& sparse, std::int64_t first, Body body) {
  for (std::int64_t seq = 0; seq < sparse.seqs; ++seq) {
    for (std::int64_t head = 0; head < sparse.heads; ++head) {
      for (std::int64_t token = 0; token < sparse.tokens; ++token) {
        body(seq * packed.seq + head * packed.head + token * packed.token,
             first + seq * sparse.seq + head * sparse.head + token * sparse.token);
      }
    }
  }
}

TEST_F(SparseTest, StridesBeyond32BitsGiveThePackedTensorsBits) {
  constexpr std::int64_t kDim = 64;
  const Strides shapes[] = {
      {"seq stride 2^30", 5, 2, 4, 1LL << 30, 4 * kDim, kDim},
      {"head stride 2^30", 1, 5, 4, 5LL << 30, 1LL << 30, kDim},
      {"token stride 2^26", 1, 1, 40, 40LL << 26, 0, 1LL << 26},
      {"token stride 2^31 + 64", 1, 2, 3, 0, kDim, (1LL << 31) + 64},
      {"reversed tokens", 2, 2, 40, 1LL << 32, 40 * kDim, -kDim},
      {"token stride 2^26, unaligned", 1, 1, 40, 0, 0, (1LL << 26) + 1},
  };
  for (const Strides& shape : shapes) {
    for (const KvFormat format : {KvFormat::bf16, KvFormat::f32}) {
      const std::int64_t element = format == KvFormat::f32 ? 4 : 2;
      CaseSpec spec = make_case(format, kDim, 3, shape.heads, shape.tokens);
      spec.problem.num_seqs = shape.seqs;
      spec.kv_lens.clear();
      // The packed tensors go to the same kernel: the generic one without alignment or where 32 bits hold no row's bytes.
      if (shape.token % 8 != 0 || shape.token * element > (1LL << 31)) spec.k.row_gap = spec.v.row_gap = 1;
      const Plan plan = conformance::plan_case(spec, device());
      CaseTensors tensors(spec);
      DeviceCase packed(plan, spec, tensors);
      packed.prepare();
      packed.attend();
      ASSERT_EQ(packed.fetch(), "") << shape.name;
      const Inputs& in = packed.inputs();

      const std::int64_t first = shape.token < 0 ? -(shape.tokens - 1) * shape.token : 0;
      const std::int64_t last = (shape.seqs - 1) * shape.seq + (shape.heads - 1) * shape.head +
                                (shape.tokens - 1) * std::abs(shape.token) + kDim;
      const std::int64_t far = (1LL << 31) + 64;  // elements between two sequences of q and out
      const auto size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
      SparseTensor k(*driver_, size(last * element));
      SparseTensor v(*driver_, size(last * element));
      SparseTensor q(*driver_, size(shape.seqs * far * element));
      SparseTensor out(*driver_, size(shape.seqs * far * 4));
      ASSERT_TRUE(k.valid() && v.valid() && q.valid() && out.valid()) << "no addresses for " << shape.name;

      const auto copy_rows = [&](const TensorView& from, SparseTensor& to, const Strides& strides, std::int64_t begin) {
        const Strides packed_strides = {"", 0, 0, 0, from.seq_stride, from.head_stride, from.token_stride};
        for_each_row(packed_strides, strides, begin, [&](std::int64_t at_packed, std::int64_t at_sparse) {
          to.back(at_sparse * element, kDim * element);
          ASSERT_CUDA(cudaMemcpy(to.data() + at_sparse * element,
                                 static_cast<const unsigned char*>(from.data) + at_packed * element,
                                 size(kDim * element), cudaMemcpyDeviceToDevice));
        });
      };
      const Strides q_strides = {"", shape.seqs, 3 * shape.heads, 1, far, kDim, kDim};
      copy_rows(in.k, k, shape, first);
      copy_rows(in.v, v, shape, first);
      copy_rows(in.q, q, q_strides, 0);
      for_each_row(q_strides, q_strides, 0, [&](std::int64_t, std::int64_t at) { out.back(at * 4, kDim * 4); });
      if (HasFatalFailure()) return;
      ASSERT_CUDA(cudaDeviceSynchronize());

      Inputs inputs = in;
      inputs.k = {k.data() + first * element, shape.seq, shape.head, shape.token};
      inputs.v = {v.data() + first * element, shape.seq, shape.head, shape.token};
      inputs.q = {q.data(), far, kDim, kDim};
      Outputs outputs = packed.outputs();
      outputs.out = out.data();
      outputs.out_seq_stride = far;
      outputs.out_head_stride = kDim;
      outputs.out_token_stride = kDim;
      Context context;
      context.cuda_stream = packed.stream();
      attend(plan, inputs, outputs, packed.workspace(), plan.workspace_bytes(), context);
      conformance::wait_for_stream(packed.stream(), shape.name);
      const Outputs& packed_out = packed.outputs();
      const Strides out_strides = {
          "", 0, 0, 0, packed_out.out_seq_stride, packed_out.out_head_stride, packed_out.out_token_stride};
      for_each_row(out_strides, q_strides, 0, [&](std::int64_t at_packed, std::int64_t at_sparse) {
        float want[kDim];
        float got[kDim];
        ASSERT_CUDA(cudaMemcpy(want, static_cast<const float*>(packed_out.out) + at_packed, sizeof want,
                               cudaMemcpyDeviceToHost));
        ASSERT_CUDA(cudaMemcpy(got, reinterpret_cast<const float*>(out.data()) + at_sparse, sizeof got,
                               cudaMemcpyDeviceToHost));
        for (std::int64_t dim = 0; dim < kDim; ++dim) {
          ASSERT_EQ(got[dim], want[dim]) << shape.name << ' ' << to_string(format) << " out element "
                                         << at_sparse + dim;
        }
      });
      if (HasFatalFailure()) return;
    }
  }
}

// 2^25 tokens: one zero chunk of memory stands everywhere but at both ends. With q = 0 every weight is equal, so out shows
// whether the first and the last token were read, and lse how many there were.
TEST_F(SparseTest, AContextOfMillionsOfTokens) {
  constexpr std::int64_t kDim = 128;
  constexpr std::int64_t kTokens = (1 << 25) + 5;
  constexpr float kValue = 33554432.0F;  // 2^25
  for (const KvFormat format : {KvFormat::bf16, KvFormat::f32}) {
    const std::int64_t element = format == KvFormat::f32 ? 4 : 2;
    const std::size_t chunk_bytes = std::size_t{64} << 20;
    const auto bytes = static_cast<std::size_t>(kTokens * kDim * element);
    Chunk zeros(*driver_, chunk_bytes);
    Chunk first(*driver_, chunk_bytes);
    Chunk last(*driver_, chunk_bytes);
    ASSERT_TRUE(zeros.valid() && first.valid() && last.valid()) << "no device memory";
    SparseMemory k(*driver_, bytes + chunk_bytes);
    SparseMemory v(*driver_, bytes + chunk_bytes);
    ASSERT_TRUE(k.valid() && v.valid()) << "no addresses";
    const std::size_t last_offset = (bytes - 1) / chunk_bytes * chunk_bytes;
    for (std::size_t offset = 0; offset <= last_offset; offset += chunk_bytes) {
      ASSERT_TRUE(k.back(offset, zeros));
      ASSERT_TRUE(v.back(offset, offset == 0 ? first : offset == last_offset ? last : zeros));
    }
    for (const std::size_t offset : {std::size_t{0}, chunk_bytes, last_offset}) {
      ASSERT_CUDA(cudaMemset(v.data() + offset, 0, chunk_bytes));
    }
    const auto put_value = [&](std::int64_t token, std::int64_t dim) {
      const std::uint16_t half = shared::f32_to_bf16(kValue);
      return cudaMemcpy(v.data() + (token * kDim + dim) * element,
                        format == KvFormat::f32 ? static_cast<const void*>(&kValue) : &half,
                        static_cast<std::size_t>(element), cudaMemcpyHostToDevice);
    };
    ASSERT_CUDA(put_value(0, 0));
    ASSERT_CUDA(put_value(kTokens - 1, 1));

    CaseSpec spec = make_case(format, kDim, 8, 1, 1);
    spec.q_value = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return 0.0; };
    CaseTensors tensors(spec);
    spec.problem.max_kv_len = kTokens;
    spec.kv_lens.clear();
    for (const JoinKind& join : {join_kinds()[0], join_kinds()[4]}) {
      join.apply(spec);
      const Plan plan = conformance::plan_case(spec, device());
      DeviceCase on_device(plan, spec, tensors);
      ASSERT_CUDA(cudaDeviceSynchronize());
      Inputs inputs = on_device.inputs();
      inputs.k = {k.data(), 0, 0, kDim};
      inputs.v = {v.data(), 0, 0, kDim};
      inputs.kv_lens = nullptr;
      Context context;
      context.cuda_stream = on_device.stream();
      on_device.reset_outputs();
      on_device.prepare();
      attend(plan, inputs, on_device.outputs(), on_device.workspace(), plan.workspace_bytes(), context);
      ASSERT_EQ(on_device.fetch(), "");
      for (std::int64_t head = 0; head < 8; ++head) {
        EXPECT_NEAR(tensors.lse_value(0, head, 0), std::log(static_cast<double>(kTokens)), 1e-5);
        for (std::int64_t dim = 0; dim < kDim; ++dim) {
          const double want = dim < 2 ? static_cast<double>(kValue) / static_cast<double>(kTokens) : 0.0;
          ASSERT_NEAR(tensors.out_value(0, head, 0, dim), want, 2e-6)
              << to_string(format) << ' ' << join.name << " head " << head << " dim " << dim;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvonce::cuda_test
