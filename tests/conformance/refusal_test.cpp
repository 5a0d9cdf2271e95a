// Wrong arguments are refused before anything is written; every option either acts or is refused.
#include <cstdint>
#include <functional>

#include "target_test.hpp"

namespace kvonce::conformance {
namespace {

class RefusalTest : public TargetTest {
 protected:
  static CaseSpec unequal() {
    CaseSpec spec = typical(2, KvFormat::f16);
    spec.kv_starts = {1, 0, 2};
    return spec;
  }

  // Applies `change` to valid arguments and expects InvalidArgument, a message that contains `named`, and nothing written.
  struct Arguments {
    Inputs inputs;
    Outputs outputs;
    void* workspace;
    std::size_t workspace_bytes;
    Context context;
  };
  static void expect_refused(const std::string& named, const std::function<void(Arguments&)>& change) {
    const CaseSpec spec = unequal();
    const Plan plan = plan_case(spec, device());
    CaseTensors tensors(spec);
    GuardedBuffer workspace(plan.workspace_bytes(), GuardedBuffer::Place::kFlushEnd);
    workspace.fill_byte(0xff);
    Arguments arguments{tensors.inputs(), tensors.outputs(), workspace.data(), workspace.bytes(), {}};
    change(arguments);
    bool refused = false;
    try {
      attend(plan, arguments.inputs, arguments.outputs, arguments.workspace, arguments.workspace_bytes,
             arguments.context);
    } catch (const Error& error) {
      refused = true;
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << named;
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
    EXPECT_TRUE(refused) << named;
    for (const unsigned char byte : tensors.result_bytes()) ASSERT_EQ(byte, 0xff) << named;
    EXPECT_EQ(tensors.stray_writes(), "") << named;
  }
};

TEST_P(RefusalTest, WrongArgumentsOfAttend) {
  static const std::vector<std::int32_t> negative = {5, -1, 3};
  static const std::vector<std::int32_t> too_long = {5, 201, 3};
  static const std::vector<std::int32_t> smallest = {INT32_MIN, 0, 3};
  static const std::vector<std::int32_t> largest = {5, 0, INT32_MAX};
  static const std::vector<std::int32_t> past_the_end = {198, 0, 0};
  static const std::vector<float> floats(64, 1.0F);
  static const std::vector<std::uint8_t> bytes(1 << 16, 1);
  static const std::vector<std::int32_t> table(64, 0);
  static const Segment segment = {0, 1, 0, 0, 1};
  using A = Arguments;
  expect_refused("q", [](A& a) { a.inputs.q.data = nullptr; });
  expect_refused("k", [](A& a) { a.inputs.k.data = nullptr; });
  expect_refused("v", [](A& a) { a.inputs.v.data = nullptr; });
  expect_refused("out", [](A& a) { a.outputs.out = nullptr; });
  expect_refused("kv_lens[1]", [](A& a) { a.inputs.kv_lens = negative.data(); });
  expect_refused("kv_lens[1]", [](A& a) { a.inputs.kv_lens = too_long.data(); });
  expect_refused("kv_lens[0]", [](A& a) { a.inputs.kv_lens = smallest.data(); });
  expect_refused("kv_lens[2]", [](A& a) { a.inputs.kv_lens = largest.data(); });
  expect_refused("kv_starts[1]", [](A& a) { a.inputs.kv_starts = negative.data(); });
  expect_refused("kv_starts[1]", [](A& a) { a.inputs.kv_starts = too_long.data(); });
  expect_refused("kv_starts[0]", [](A& a) { a.inputs.kv_starts = smallest.data(); });
  expect_refused("kv_starts[2]", [](A& a) { a.inputs.kv_starts = largest.data(); });
  expect_refused("kv_starts[0]", [](A& a) { a.inputs.kv_starts = past_the_end.data(); });
  expect_refused("workspace", [](A& a) { --a.workspace_bytes; });
  expect_refused("workspace", [](A& a) { a.workspace = nullptr; });
  expect_refused("num_threads", [](A& a) { a.context.num_threads = 3; });
  expect_refused("num_threads", [](A& a) { a.context.num_threads = -1; });
  expect_refused("mask", [](A& a) { a.inputs.mask = bytes.data(); });
  expect_refused("sinks", [](A& a) { a.inputs.sinks = floats.data(); });
  expect_refused("alibi_slopes", [](A& a) { a.inputs.alibi_slopes = floats.data(); });
  expect_refused("mask_slopes", [](A& a) { a.inputs.mask_slopes = floats.data(); });
  expect_refused("block_table", [](A& a) { a.inputs.block_table = table.data(); });
  expect_refused("k_scales", [](A& a) { a.inputs.k_scales.data = floats.data(); });
  expect_refused("v_scales", [](A& a) { a.inputs.v_scales.data = floats.data(); });
  expect_refused("k_biases", [](A& a) { a.inputs.k_biases.data = floats.data(); });
  expect_refused("v_biases", [](A& a) { a.inputs.v_biases.data = floats.data(); });
  expect_refused("segments", [](A& a) {
    a.inputs.segments = &segment;
    a.inputs.num_segments = 1;
  });
}

TEST_P(RefusalTest, HeadCountsThatDoNotDivide) {
  const std::pair<int, int> heads[] = {{33, 2}, {3, 2}, {5, 4}, {1, 2}, {0, 1}, {8, 0}, {-4, 2}, {4, -2}};
  for (const auto& [num_q_heads, num_kv_heads] : heads) {
    Problem problem = typical().problem;
    problem.num_q_heads = num_q_heads;
    problem.num_kv_heads = num_kv_heads;
    try {
      (void)make_plan(problem, device());
      ADD_FAILURE() << num_q_heads << '/' << num_kv_heads << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_NE(std::string(error.what()).find("_heads"), std::string::npos) << error.what();
    }
  }
}

TEST_P(RefusalTest, PolicyFieldsActOrAreRefused) {
  const std::pair<const char*, std::int64_t Policy::*> fields[] = {{"row_tile", &Policy::row_tile},
                                                                   {"rows_per_worker", &Policy::rows_per_worker},
                                                                   {"chunk_tokens", &Policy::chunk_tokens},
                                                                   {"step_tokens", &Policy::step_tokens},
                                                                   {"prefetch_tokens", &Policy::prefetch_tokens},
                                                                   {"prefetch_lines", &Policy::prefetch_lines},
                                                                   {"worker_bytes", &Policy::worker_bytes},
                                                                   {"prefetch_level", &Policy::prefetch_level},
                                                                   {"heads_per_step", &Policy::heads_per_step}};
  for (const auto& [name, member] : fields) {
    for (const std::int64_t value : {1, 2, 3, 5, 8, 16, 17, 64, 100, 4096}) {
      CaseSpec spec = typical(3, KvFormat::f16, 64, 5, 2);
      spec.options.policy.*member = value;
      spec.name = std::string(name) + "=" + std::to_string(value);
      try {
        const Plan plan = plan_case(spec, device());
        EXPECT_EQ(plan.policy().*member, value) << spec.name << " was replaced in silence";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
        continue;
      }
      expect_oracle(spec);
    }
  }
}

struct Option {
  const char* name;
  void (*set)(CaseSpec&);
};

const Option kOptions[] = {
    {"causal=false", [](CaseSpec& s) { s.problem.causal = false; }},
    {"window", [](CaseSpec& s) { s.problem.window = 7; }},
    {"scale", [](CaseSpec& s) { s.problem.scale = 0.25F; }},
    {"negative scale", [](CaseSpec& s) { s.problem.scale = -0.25F; }},
    {"softcap", [](CaseSpec& s) { s.problem.softcap = 1.5F; }},
    {"sinks", [](CaseSpec& s) { s.problem.has_sinks = true; }},
    {"alibi", [](CaseSpec& s) { s.problem.has_alibi = true; }},
    {"boolean mask", [](CaseSpec& s) { s.problem.mask = MaskKind::boolean; }},
    {"additive mask", [](CaseSpec& s) { s.problem.mask = MaskKind::additive; }},
    {"mask slopes",
     [](CaseSpec& s) {
       s.problem.mask = MaskKind::additive;
       s.problem.has_mask_slopes = true;
     }},
    {"tree mask",
     [](CaseSpec& s) {
       s.problem.mask = MaskKind::tree;
       s.mask_value = [](std::int64_t, std::int64_t, std::int64_t row, std::int64_t key) {
         return row == key ? 1.0 : 0.0;
       };
     }},
    {"kv_starts",
     [](CaseSpec& s) {
       s.kv_starts = {40, 0, 9};
     }},
    {"segments",
     [](CaseSpec& s) {
       s.problem.has_segments = true;
       s.kv_lens.clear();
       s.segments = {{0, 3, 0, 0, 30}, {1, 2, 1, 3, 20}, {2, 3, 2, 0, 9}};
     }},
};

// On every format: the option changes the result and agrees with the oracle, or the plan is refused as Unsupported.
TEST_P(RefusalTest, EveryOptionActsOrIsRefused) {
  int acted = 0;
  int refused = 0;
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::f8_e4m3, KvFormat::mlx_int8,
                                KvFormat::mlx_int4, KvFormat::q8_0, KvFormat::q4_0}) {
    CaseSpec plain = typical(3, KvFormat::f32, 64, 3, 2);
    plain.problem.k_format = plain.problem.v_format = format;
    if (format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4) plain.problem.quant_group = 32;
    std::vector<unsigned char> without;
    try {
      without = result_bytes(plain);
      expect_oracle(plain);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Unsupported) << error.what();
    }
    for (const Option& option : kOptions) {
      CaseSpec with = plain;
      option.set(with);
      with.name = std::string(option.name) + " " + std::string(to_string(format));
      try {
        (void)plan_case(with, device());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported) << with.name << ": " << error.what();
        EXPECT_GT(std::string(error.what()).size(), 20U) << with.name;
        ++refused;
        continue;
      }
      ++acted;
      EXPECT_NE(without, result_bytes(with)) << with.name << " changed nothing";
      expect_oracle(with);
    }
    for (const KvLayout layout : {KvLayout::paged_nhd, KvLayout::paged_hnd}) {
      for (const std::int64_t page_size : {1, 16, 33, 256}) {
        CaseSpec paged = plain;
        paged.problem.layout = layout;
        paged.problem.page_size = page_size;
        paged.name = "paged " + std::to_string(page_size) + " " + std::string(to_string(format));
        try {
          (void)plan_case(paged, device());
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::Unsupported) << paged.name << ": " << error.what();
          ++refused;
          continue;
        }
        ++acted;
        expect_oracle(paged);
      }
    }
  }
  EXPECT_GE(acted, 15);  // causal, window, both scales and kv_starts on the three plain formats
  RecordProperty("options_acted", acted);
  RecordProperty("options_refused", refused);
}

TEST_P(RefusalTest, UnavailableDevicesSayWhy) {
  Device missing = device();
  missing.unavailable = "no such processor";
  try {
    (void)make_plan(typical().problem, missing);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Unavailable);
    EXPECT_NE(std::string(error.what()).find("no such processor"), std::string::npos);
  }
}

KVONCE_ON_EVERY_TARGET(RefusalTest);

}  // namespace
}  // namespace kvonce::conformance
