// Nothing to do, empty rows, extreme scores, and offsets beyond 2^31 elements.
#include <sys/mman.h>

#include <cmath>
#include <limits>

#include "generator.hpp"
#include "shared/numeric.h"
#include "target_test.hpp"

namespace kvonce::conformance {
namespace {

class EdgeTest : public TargetTest {};

TEST_P(EdgeTest, NothingToDo) {
  for (const std::int64_t num_seqs : {0, 3}) {
    for (const std::int64_t q_len : {0, 2}) {
      for (const std::int64_t max_kv_len : {0, 200}) {
        CaseSpec spec = typical(q_len);
        spec.problem.num_seqs = num_seqs;
        spec.problem.max_kv_len = max_kv_len;
        spec.kv_lens.assign(static_cast<std::size_t>(num_seqs), 0);
        expect_oracle(spec);
      }
    }
  }
}

// Rows without keys: kv_len 0, more query tokens than keys, padding that covers everything.
TEST_P(EdgeTest, EmptyRowsAreZeroAndMinusInfinity) {
  for (const KvFormat format : kPlainFormats) {
    for (const std::int64_t chunk : {0, 1}) {
      CaseSpec spec = typical(8, format, 96, 3, 2);
      spec.kv_lens = {0, 5, 66};
      spec.kv_starts = {0, 0, 66};
      spec.options.chunk_tokens = chunk;
      const Plan plan = plan_case(spec, device());
      CaseTensors tensors(spec);
      ASSERT_EQ(run_case(plan, spec, tensors), "");
      for (std::int64_t seq = 0; seq < 3; ++seq) {
        for (std::int64_t head = 0; head < 6; ++head) {
          for (std::int64_t row = 0; row < 8; ++row) {
            const bool empty = seq != 1 || row < 3;
            const double lse = tensors.lse_value(seq, head, row);
            EXPECT_EQ(empty, lse == -std::numeric_limits<double>::infinity()) << seq << ' ' << row;
            EXPECT_EQ(empty, tensors.out_value(seq, head, row, 0) == 0.0) << seq << ' ' << row;
          }
        }
      }
      expect_oracle(spec);
    }
  }
}

// Scores far outside exp's range, alone and next to ordinary ones.
TEST_P(EdgeTest, ExtremeScores) {
  for (const double size : {60.0, 100.0, 1e4, 6e4}) {
    for (const std::int64_t chunk : {0, 7}) {
      CaseSpec spec = typical(2, KvFormat::f32, 64, 3, 2);
      spec.problem.scale = 1.0F;
      spec.options.chunk_tokens = chunk;
      spec.name += " scores " + std::to_string(size);
      spec.q_value = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t d) { return d == 0 ? 1.0 : 0.0; };
      spec.k_value = [size](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
        return d == 0 ? size * static_cast<double>(token % 5 - 3) : 0.0;
      };
      expect_oracle(spec);
    }
  }
}

TEST_P(EdgeTest, HugeAndTinyValuesOfV) {
  for (const double size : {1e-30, 1e30}) {
    CaseSpec spec = typical(1, KvFormat::f32, 64, 3, 2);
    spec.v_value = [size](std::int64_t, std::int64_t, std::int64_t token, std::int64_t) {
      return size * static_cast<double>(token % 3 + 1);
    };
    spec.v_max = 3.0 * size;
    expect_oracle(spec);
  }
}

// A needle at the first key that the row sees, with flat noise elsewhere: half of the weight is far away from the row.
CaseSpec needle_far_away(std::int32_t kv_len, std::int64_t window) {
  CaseSpec spec = typical(1, KvFormat::f16, 64, 2, 1);
  spec.problem.num_seqs = 1;
  spec.problem.max_kv_len = kv_len + 1;
  spec.problem.window = window;
  spec.kv_lens = {kv_len};
  spec.name = "kv=" + std::to_string(kv_len) + " window=" + std::to_string(window);
  spec.problem.scale = 1.0F;
  spec.q_value = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t d) { return d == 0 ? 1.0 : 0.0; };
  const std::int64_t needle = window > 0 ? kv_len - window : 0;
  spec.k_value = [kv_len, needle](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
    if (d != 0) return 0.0;
    return token == needle ? std::log(static_cast<double>(kv_len - needle))
                           : normal_value(3, static_cast<std::uint64_t>(token)) / 64;
  };
  return spec;
}

TEST_P(EdgeTest, LongContexts) {
  for (const std::int32_t kv_len :
       {16383, 16384, 16385, 32767, 32768, 32769, 65535, 65536, 65537, 131073, (1 << 20) + 1}) {
    if (quick() && kv_len > 20000) continue;
    expect_oracle(needle_far_away(kv_len, 0));
  }
}

TEST_P(EdgeTest, WindowsOfLongContexts) {
  for (const std::int32_t kv_len : {32767, 32768, 32769, 65535, 65536, 65537, 66048}) {
    if (quick() && kv_len != 32769 && kv_len != 65537) continue;
    expect_oracle(needle_far_away(kv_len, 128));
  }
}

// Address space without memory behind it: only the touched pages exist.
class SparseSpace {
 public:
  explicit SparseSpace(std::size_t bytes) : bytes_(bytes) {
    base_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparseSpace() {
    if (valid()) munmap(base_, bytes_);
  }
  SparseSpace(const SparseSpace&) = delete;
  SparseSpace& operator=(const SparseSpace&) = delete;
  [[nodiscard]] bool valid() const { return base_ != MAP_FAILED; }
  [[nodiscard]] void* data() const { return base_; }

 private:
  std::size_t bytes_;
  void* base_;
};

struct BigStrides {
  const char* name;
  std::int64_t seqs, heads, tokens, seq_stride, head_stride, token_stride;
};

// V13: products of index and stride beyond 2^31 and 2^32 elements, for K, V, q and out.
TEST_P(EdgeTest, OffsetsBeyond32Bits) {
  const std::int64_t dim = 64;
  const BigStrides shapes[] = {
      {"seq stride 2^30", 5, 2, 4, 1LL << 30, 4 * dim, dim},
      {"head stride 2^30", 1, 5, 4, 5LL << 30, 1LL << 30, dim},
      {"token stride 2^26", 1, 1, 40, 40LL << 26, 0, 1LL << 26},
      {"token stride 2^31 + 64", 1, 2, 3, 0, dim, (1LL << 31) + 64},
      {"reversed tokens", 2, 2, 4, 1LL << 30, 4 * dim, -dim},
  };
  for (const BigStrides& shape : shapes) {
    for (const KvFormat format : {KvFormat::f16, KvFormat::f32}) {
      const std::int64_t element = format == KvFormat::f32 ? 4 : 2;
      const std::int64_t last = (shape.seqs - 1) * shape.seq_stride + (shape.heads - 1) * shape.head_stride +
                                (shape.tokens - 1) * std::abs(shape.token_stride) + dim;
      SparseSpace k_space(static_cast<std::size_t>((last + dim) * element));
      SparseSpace v_space(static_cast<std::size_t>((last + dim) * element));
      const std::int64_t row_stride = 1LL << 30;  // of q and out, between sequences
      SparseSpace q_space(static_cast<std::size_t>(shape.seqs * row_stride * 4));
      SparseSpace out_space(static_cast<std::size_t>(shape.seqs * row_stride * 4));
      ASSERT_TRUE(k_space.valid() && v_space.valid() && q_space.valid() && out_space.valid())
          << "this machine refuses mappings of " << last * element << " bytes";
      const std::int64_t first = shape.token_stride < 0 ? -(shape.tokens - 1) * shape.token_stride : 0;

      Problem p;
      p.num_seqs = shape.seqs;
      p.num_kv_heads = shape.heads;
      p.num_q_heads = 3 * shape.heads;
      p.head_dim_qk = dim;
      p.max_kv_len = shape.tokens;
      p.k_format = p.v_format = format;
      Inputs inputs;
      const auto place = [&](const SparseSpace& space, TensorView& view, std::uint64_t seed) {
        std::uint64_t i = 0;
        view = {static_cast<unsigned char*>(space.data()) + first * element, shape.seq_stride, shape.head_stride,
                shape.token_stride};
        for (std::int64_t seq = 0; seq < shape.seqs; ++seq) {
          for (std::int64_t head = 0; head < shape.heads; ++head) {
            for (std::int64_t token = 0; token < shape.tokens; ++token) {
              for (std::int64_t d = 0; d < dim; ++d) {
                const auto x = static_cast<float>(normal_value(seed, i++));
                const std::int64_t at =
                    first + seq * shape.seq_stride + head * shape.head_stride + token * shape.token_stride + d;
                if (format == KvFormat::f32) {
                  static_cast<float*>(space.data())[at] = x;
                } else {
                  static_cast<std::uint16_t*>(space.data())[at] = shared::f32_to_f16(x);
                }
              }
            }
          }
        }
      };
      place(k_space, inputs.k, 1);
      place(v_space, inputs.v, 2);
      auto* q = static_cast<float*>(q_space.data());
      auto* out = static_cast<float*>(out_space.data());
      for (std::int64_t seq = 0; seq < shape.seqs; ++seq) {
        for (std::int64_t i = 0; i < p.num_q_heads * dim; ++i) {
          q[seq * row_stride + i] = static_cast<float>(normal_value(3, static_cast<std::uint64_t>(seq * 4096 + i)));
        }
      }
      inputs.q = {q, row_stride, dim, dim};
      Outputs outputs;
      outputs.out = out;
      outputs.out_seq_stride = row_stride;
      outputs.out_head_stride = dim;
      outputs.out_token_stride = dim;

      PlanOptions options;
      options.policy.step_tokens = 16;  // steps that begin past 2^31 elements: 40 tokens are one step else
      const Plan plan = make_plan(p, device(), options);
      std::vector<unsigned char> workspace(plan.workspace_bytes());
      attend(plan, inputs, outputs, workspace.data(), workspace.size());
      const auto oracle = core::reference_attend(plan.problem(), inputs);
      for (std::int64_t seq = 0; seq < shape.seqs; ++seq) {
        for (std::int64_t i = 0; i < p.num_q_heads * dim; ++i) {
          const double want = oracle.out[static_cast<std::size_t>(seq * p.num_q_heads * dim + i)];
          ASSERT_NEAR(static_cast<double>(out[seq * row_stride + i]), want, 1e-5) << shape.name << " seq " << seq;
        }
      }
    }
  }
}

KVONCE_ON_EVERY_TARGET(EdgeTest);

}  // namespace
}  // namespace kvonce::conformance
