// What must not change a row's bits when chunk_tokens is given (PlanOptions): the rest of the batch and the capacity.
#include "device_test.hpp"
#include "generator.hpp"

namespace kvonce::cuda_test {
namespace {

class InvarianceTest : public DeviceTest {
 protected:
  static CaseSpec batch_of_17(KvFormat format, std::int64_t kv_heads, std::int64_t q_len) {
    CaseSpec spec = make_case(format, 64, 4, kv_heads, 900, q_len);
    spec.problem.num_seqs = 17;
    spec.kv_lens.clear();
    for (std::int32_t seq = 0; seq < 17; ++seq) spec.kv_lens.push_back(seq * 53 % 901);
    spec.options.chunk_tokens = 48;
    const auto value = [](std::uint64_t seed) {
      return [seed](std::int64_t seq, std::int64_t head, std::int64_t token, std::int64_t d) {
        return conformance::normal_value(seed, static_cast<std::uint64_t>(((seq * 64 + head) * 1024 + token) * 64 + d));
      };
    };
    spec.q_value = value(1);
    spec.k_value = value(2);
    spec.v_value = value(3);
    return spec;
  }
};

TEST_F(InvarianceTest, ARowAloneEqualsTheRowInABatch) {
  for (const std::int64_t kv_heads : {1, 2, 5}) {
    for (const std::int64_t q_len : {1, 3}) {
      for (const KvFormat format : {KvFormat::f32, KvFormat::bf16}) {
        const CaseSpec batch = batch_of_17(format, kv_heads, q_len);
        const std::vector<unsigned char> together = result_bytes(batch);
        const std::size_t per_seq = together.size() / 17;
        for (std::size_t seq = 0; seq < 17; ++seq) {
          CaseSpec alone = batch;
          alone.problem.num_seqs = 1;
          alone.kv_lens = {batch.kv_lens[seq]};
          alone.problem.max_kv_len = alone.kv_lens[0] + 1;
          const auto shifted = [seq](const conformance::ValueFn& value) {
            return [value, seq](std::int64_t, std::int64_t head, std::int64_t token, std::int64_t d) {
              return value(static_cast<std::int64_t>(seq), head, token, d);
            };
          };
          alone.q_value = shifted(batch.q_value);
          alone.k_value = shifted(batch.k_value);
          alone.v_value = shifted(batch.v_value);
          const std::vector<unsigned char> row(together.begin() + static_cast<std::ptrdiff_t>(seq * per_seq),
                                               together.begin() + static_cast<std::ptrdiff_t>((seq + 1) * per_seq));
          EXPECT_EQ(result_bytes(alone) == row, true)
              << batch.name << " kv_len " << alone.kv_lens[0] << " of sequence " << seq;
        }
      }
    }
  }
}

TEST_F(InvarianceTest, CapacityChangesNoBit) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16}) {
    CaseSpec spec = make_case(format, 128, 4, 2, 700, 2);
    spec.options.chunk_tokens = 64;
    const std::vector<unsigned char> tight = result_bytes(spec);
    for (const std::int64_t capacity : {701, 1400, 44800}) {
      spec.problem.max_kv_len = capacity;
      EXPECT_EQ(result_bytes(spec) == tight, true) << spec.name << " capacity " << capacity;
    }
  }
}

}  // namespace
}  // namespace kvonce::cuda_test
