// Views of tensors against packed copies, bit by bit; any alignment; exact workspaces.
#include "target_test.hpp"

namespace kvonce::conformance {
namespace {

class LayoutTest : public TargetTest {};

// Every combination of packed and strided q, K, V and out, at lengths around multiples of the tile sizes.
TEST_P(LayoutTest, StridedViewsMatchPackedCopies) {
  for (const KvFormat format : kPlainFormats) {
    for (const std::int32_t kv_len : {62, 63, 64, 65}) {
      CaseSpec spec = typical(2, format, 80);
      spec.kv_lens = {kv_len, 31, 0};
      const auto packed = result_bytes(spec);
      for (unsigned combination = 1; combination < 16; ++combination) {
        CaseSpec strided = spec;
        TensorLayout* layouts[] = {&strided.q, &strided.k, &strided.v, &strided.out};
        for (unsigned i = 0; i < 4; ++i) {
          if ((combination >> i & 1U) == 0) continue;
          layouts[i]->token_major = true;
          layouts[i]->row_gap = 4 + static_cast<std::int64_t>(i);
          layouts[i]->spare_tokens = 3 * static_cast<std::int64_t>(i);
        }
        EXPECT_EQ(packed, result_bytes(strided)) << spec.name << " kv " << kv_len << " combination " << combination;
      }
    }
  }
}

TEST_P(LayoutTest, ExpandedHeadsMatchTheMaterialisedCopy) {
  for (const KvFormat format : kPlainFormats) {
    for (const std::int32_t kv_len : {31, 32, 33, 64, 65, 97}) {
      for (const std::int64_t dim : {64, 512}) {
        CaseSpec expanded = typical(1, format, dim, 2, 3);
        expanded.problem.num_seqs = 1;
        expanded.kv_lens = {kv_len};
        expanded.k_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
          return static_cast<double>((token * 13 + d * 7) % 17 - 8) / 4.0;
        };
        expanded.v_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
          return static_cast<double>((token * 5 + d * 3) % 23 - 11) / 4.0;
        };
        const auto copied = result_bytes(expanded);
        expanded.k.expand_heads = true;
        expanded.v.expand_heads = true;
        EXPECT_EQ(copied, result_bytes(expanded)) << expanded.name << " kv " << kv_len;
      }
    }
  }
}

// Row pitches and base addresses that are multiples of one element only.
TEST_P(LayoutTest, AnyPitchAndAlignment) {
  for (const KvFormat format : kPlainFormats) {
    const std::int64_t element = format == KvFormat::f32 ? 4 : 2;
    for (const std::int64_t dim : {40, 46, 72, 80, 128}) {
      CaseSpec spec = typical(1, format, dim);
      const auto packed = result_bytes(spec);
      for (const std::int64_t gap : {0, 1, 4}) {
        for (const std::int64_t elements : {1, 2, 4, 7}) {
          CaseSpec shifted = spec;
          for (TensorLayout* layout : {&shifted.q, &shifted.k, &shifted.v, &shifted.out}) {
            layout->row_gap = gap;
            layout->offset_bytes = elements * (layout == &shifted.out ? 4 : element);  // out is float32
          }
          EXPECT_EQ(packed, result_bytes(shifted)) << spec.name << " gap " << gap << " offset " << elements;
        }
      }
    }
  }
}

// Every dim: loop tails, NaN-filled outputs, against the oracle.
TEST_P(LayoutTest, EveryHeadDim) {
  for (std::int64_t dim = 1; dim <= 130; ++dim) {
    CaseSpec spec = typical(1, kPlainFormats[dim % 3], dim, 3, 2);
    spec.kv_lens = {35, 1, 0};
    expect_oracle(spec);
  }
  for (const std::int64_t dim : {255, 256, 257, 511, 513, 576, 1000, 1023, 1024}) {
    CaseSpec spec = typical(1, kPlainFormats[dim % 3], dim, 3, 2);
    spec.kv_lens = {35, 1, 0};
    expect_oracle(spec);
  }
}

TEST_P(LayoutTest, WorkspaceAtAnyAlignmentAndExactSize) {
  // One thread and one row per tile leave the fewest unused bytes at the workspace's end.
  CaseSpec spec = typical(2, KvFormat::bf16, 96);
  spec.num_threads = 1;
  spec.options.policy.row_tile = 1;
  spec.options.chunk_tokens = 32;
  const Plan plan = plan_case(spec, device());
  CaseTensors tensors(spec);
  ASSERT_EQ(run_case(plan, spec, tensors), "");
  const auto expected = tensors.result_bytes();
  for (std::size_t offset = 0; offset < 256; offset += offset < 70 ? 1 : 17) {
    tensors.reset_outputs();
    GuardedBuffer workspace(plan.workspace_bytes(), GuardedBuffer::Place::kOffset, offset);
    workspace.fill_byte(0xa5);
    attend(plan, tensors.inputs(), tensors.outputs(), workspace.data(), workspace.bytes());
    EXPECT_TRUE(workspace.margins_are(0xa5)) << "offset " << offset;
    EXPECT_EQ(expected, tensors.result_bytes()) << "offset " << offset;
  }
}

KVONCE_ON_EVERY_TARGET(LayoutTest);

}  // namespace
}  // namespace kvonce::conformance
