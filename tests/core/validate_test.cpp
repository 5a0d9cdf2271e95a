#include "core/validate.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace kvonce::core {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

Problem valid_problem() {
  Problem p;
  p.num_seqs = 3;
  p.q_len = 2;
  p.num_q_heads = 12;
  p.num_kv_heads = 4;
  p.head_dim_qk = 64;
  p.max_kv_len = 100;
  return p;
}

// Expects InvalidArgument whose message reads "<argument>: got <given>, allowed: <something>".
void expect_refused(const std::function<void()>& call, const std::string& argument, const std::string& given) {
  try {
    call();
    ADD_FAILURE() << argument << " = " << given << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
    const std::string message = error.what();
    const std::string start = argument + ": got " + given + ", allowed: ";
    EXPECT_EQ(message.rfind(start, 0), 0U) << message;
    EXPECT_GT(message.size(), start.size()) << message;
  }
}

void expect_problem_refused(const std::function<void(Problem&)>& spoil, const std::string& argument,
                            const std::string& given) {
  Problem p = valid_problem();
  spoil(p);
  expect_refused([&p] { validate(p); }, argument, given);
}

void expect_problem_accepted(const std::function<void(Problem&)>& change) {
  Problem p = valid_problem();
  change(p);
  EXPECT_NO_THROW(validate(p));
}

TEST(ValidateTest, DefaultsAreResolvedAndTheRestIsKept) {
  Problem p = valid_problem();
  const Problem resolved = validate(p);
  EXPECT_EQ(resolved.head_dim_v, 64);
  EXPECT_EQ(*resolved.scale, 0.125F);
  EXPECT_EQ(resolved.num_q_heads, 12);
  EXPECT_EQ(resolved.max_kv_len, 100);
  p.head_dim_v = 32;
  p.scale = -2.0F;
  EXPECT_EQ(validate(p).head_dim_v, 32);
  EXPECT_EQ(*validate(p).scale, -2.0F);
  p.scale = 0.0F;
  EXPECT_EQ(*validate(p).scale, 0.0F) << "a scale of 0 is the caller's choice";
}

TEST(ValidateTest, EveryCountHasALowerAndAnUpperLimit) {
  struct Limits {
    const char* name;
    std::int64_t Problem::*field;
    std::int64_t low;
    std::int64_t high;
  };
  const Limits limits[] = {
      {"num_seqs", &Problem::num_seqs, 0, 1 << 20},        {"q_len", &Problem::q_len, 0, 64},
      {"num_q_heads", &Problem::num_q_heads, 1, 1 << 20},  {"num_kv_heads", &Problem::num_kv_heads, 1, 1 << 20},
      {"head_dim_qk", &Problem::head_dim_qk, 1, 1024},     {"head_dim_v", &Problem::head_dim_v, 0, 1024},
      {"max_kv_len", &Problem::max_kv_len, 0, 2147483647}, {"window", &Problem::window, 0, 2147483647},
  };
  for (const Limits& limit : limits) {
    for (const std::int64_t bad : {limit.low - 1, limit.high + 1, std::numeric_limits<std::int64_t>::min(),
                                   std::numeric_limits<std::int64_t>::max()}) {
      expect_problem_refused([&](Problem& p) { p.*limit.field = bad; }, limit.name, std::to_string(bad));
    }
    for (const std::int64_t good : {limit.low, limit.high}) {
      expect_problem_accepted([&](Problem& p) {
        p.*limit.field = good;
        if (limit.field == &Problem::num_q_heads) p.num_kv_heads = 1;
        if (limit.field == &Problem::num_kv_heads) p.num_q_heads = good;
      });
    }
  }
}

TEST(ValidateTest, QueryHeadsAreAMultipleOfKvHeads) {
  expect_problem_refused([](Problem& p) { p.num_q_heads = 13; }, "num_q_heads", "13");
  expect_problem_refused([](Problem& p) { p.num_q_heads = 2; }, "num_q_heads", "2");
  for (const std::int64_t group : {1, 3, 71, 128}) {
    expect_problem_accepted([group](Problem& p) { p.num_q_heads = 4 * group; });
  }
}

TEST(ValidateTest, ValuesOutsideAnEnumerationAreRefused) {
  const std::string given = "a value outside the enumeration";
  expect_problem_refused([](Problem& p) { p.q_dtype = static_cast<DType>(3); }, "q_dtype", given);
  expect_problem_refused([](Problem& p) { p.out_dtype = static_cast<DType>(255); }, "out_dtype", given);
  expect_problem_refused([](Problem& p) { p.k_format = static_cast<KvFormat>(8); }, "k_format", given);
  expect_problem_refused([](Problem& p) { p.v_format = static_cast<KvFormat>(200); }, "v_format", given);
  expect_problem_refused([](Problem& p) { p.scales_dtype = static_cast<DType>(3); }, "scales_dtype", given);
  expect_problem_refused([](Problem& p) { p.mask = static_cast<MaskKind>(4); }, "mask", given);
  expect_problem_refused([](Problem& p) { p.layout = static_cast<KvLayout>(3); }, "layout", given);
}

TEST(ValidateTest, QuantGroupBelongsToMlxFormatsOnly) {
  for (const KvFormat format : {KvFormat::mlx_int8, KvFormat::mlx_int4}) {
    for (const std::int64_t group : {0, 1, 16, 96, 256, -32}) {
      const auto spoil = [&](Problem& p) {
        p.head_dim_qk = 768;
        p.k_format = format;
        p.quant_group = group;
      };
      expect_problem_refused(spoil, "quant_group", std::to_string(group));
    }
    for (const std::int64_t group : {32, 64, 128}) {
      expect_problem_accepted([&](Problem& p) {
        p.head_dim_qk = 128;
        p.v_format = format;
        p.quant_group = group;
      });
    }
  }
  expect_problem_refused([](Problem& p) { p.quant_group = 32; }, "quant_group", "32");
}

TEST(ValidateTest, BlockFormatsNeedWholeBlocks) {
  for (const KvFormat format : {KvFormat::q8_0, KvFormat::q4_0}) {
    const auto odd_k = [format](Problem& p) {
      p.head_dim_qk = 80;
      p.head_dim_v = 64;
      p.k_format = format;
    };
    expect_problem_refused(odd_k, "head_dim_qk", "80");
    const auto odd_v = [format](Problem& p) {
      p.head_dim_v = 33;
      p.v_format = format;
    };
    expect_problem_refused(odd_v, "head_dim_v", "33");
    const auto v_from_qk = [format](Problem& p) {
      p.head_dim_qk = 80;  // head_dim_v follows it
      p.v_format = format;
    };
    expect_problem_refused(v_from_qk, "head_dim_v", "80");
    expect_problem_accepted([format](Problem& p) { p.k_format = p.v_format = format; });
  }
  const auto mlx = [](Problem& p) {
    p.head_dim_qk = 96;
    p.k_format = KvFormat::mlx_int4;
    p.quant_group = 64;
  };
  expect_problem_refused(mlx, "head_dim_qk", "96");
}

TEST(ValidateTest, PageSizeBelongsToPagedLayoutsOnly) {
  expect_problem_refused([](Problem& p) { p.page_size = 16; }, "page_size", "16");
  for (const KvLayout layout : {KvLayout::paged_nhd, KvLayout::paged_hnd}) {
    for (const std::int64_t page_size : {0, -1}) {
      const auto spoil = [&](Problem& p) {
        p.layout = layout;
        p.page_size = page_size;
      };
      expect_problem_refused(spoil, "page_size", std::to_string(page_size));
    }
    expect_problem_accepted([layout](Problem& p) {
      p.layout = layout;
      p.page_size = 1;
    });
  }
}

TEST(ValidateTest, VMayBeAPrefixOfKOnlyWhenItFits) {
  const auto longer = [](Problem& p) {
    p.v_is_k_prefix = true;
    p.head_dim_v = 65;
  };
  expect_problem_refused(longer, "v_is_k_prefix", "true");
  const auto other_format = [](Problem& p) {
    p.v_is_k_prefix = true;
    p.v_format = KvFormat::f16;
  };
  expect_problem_refused(other_format, "v_is_k_prefix", "true");
  expect_problem_accepted([](Problem& p) {
    p.v_is_k_prefix = true;
    p.head_dim_v = 32;
  });
}

TEST(ValidateTest, ScaleAndSoftcapAreFinite) {
  for (const float bad : {kNaN, kInf, -kInf}) {
    Problem p = valid_problem();
    p.scale = bad;
    expect_refused([&p] { validate(p); }, "scale", std::to_string(bad));
    p = valid_problem();
    p.softcap = bad;
    expect_refused([&p] { validate(p); }, "softcap", std::to_string(bad));
  }
  expect_problem_refused([](Problem& p) { p.softcap = -1.0F; }, "softcap", std::to_string(-1.0F));
  expect_problem_accepted([](Problem& p) { p.softcap = 30.0F; });
}

TEST(ValidateTest, OptionsThatNeedAnotherOptionSaySo) {
  expect_problem_refused([](Problem& p) { p.has_mask_slopes = true; }, "has_mask_slopes", "true");
  const auto boolean = [](Problem& p) {
    p.has_mask_slopes = true;
    p.mask = MaskKind::boolean;
  };
  expect_problem_refused(boolean, "has_mask_slopes", "true");
  expect_problem_accepted([](Problem& p) {
    p.has_mask_slopes = true;
    p.mask = MaskKind::additive;
  });
  const auto half_mask = [](Problem& p) { p.mask_dtype = DType::f16; };
  expect_problem_refused(half_mask, "mask_dtype", "f16");
  expect_problem_accepted([](Problem& p) {
    p.mask_dtype = DType::f16;
    p.mask = MaskKind::additive;
  });
  const auto paged_segments = [](Problem& p) {
    p.has_segments = true;
    p.layout = KvLayout::paged_nhd;
    p.page_size = 16;
  };
  expect_problem_refused(paged_segments, "has_segments", "true");
}

// Inputs that fit a problem; they read nothing of the tensors, so one small buffer stands for all.
struct Call {
  Problem problem = validate(valid_problem());
  float data[4] = {};
  std::vector<std::int32_t> kv_lens = {0, 50, 100};
  std::vector<std::int32_t> kv_starts = {0, 50, 99};
  std::vector<std::int32_t> block_table;
  std::vector<Segment> segments;
  Inputs inputs;

  Call() {
    inputs.q.data = inputs.k.data = inputs.v.data = data;
    inputs.kv_lens = kv_lens.data();
  }

  void make_paged() {
    problem.layout = KvLayout::paged_nhd;
    problem.page_size = 16;
    block_table.assign(3 * 7, 0);
    for (std::size_t i = 0; i < block_table.size(); ++i) block_table[i] = static_cast<std::int32_t>(i % 5);
    inputs.block_table = block_table.data();
    inputs.block_table_stride = 7;
    inputs.num_pages = 5;
  }

  void add_segment(Segment segment) {
    problem.has_segments = true;
    segments.push_back(segment);
    inputs.segments = segments.data();
    inputs.num_segments = static_cast<std::int64_t>(segments.size());
  }

  void validate_all() const {
    validate_inputs(problem, inputs);
    validate_lengths(problem, inputs);
  }
  void expect_accepted() const { EXPECT_NO_THROW(validate_all()); }
  void expect_refused_input(const std::string& argument, const std::string& given) const {
    expect_refused([this] { validate_all(); }, argument, given);
  }
};

TEST(ValidateTest, TensorsMayBeNullOnlyWhenNothingIsReadFromThem) {
  Call().expect_accepted();
  for (const char* name : {"q.data", "k.data", "v.data"}) {
    Call call;
    TensorView& view = name[0] == 'q' ? call.inputs.q : name[0] == 'k' ? call.inputs.k : call.inputs.v;
    view.data = nullptr;
    call.expect_refused_input(name, "null");
  }
  Call no_keys;
  no_keys.problem.max_kv_len = 0;
  no_keys.inputs.kv_lens = nullptr;
  no_keys.inputs.k.data = no_keys.inputs.v.data = nullptr;
  no_keys.expect_accepted();
  for (std::int64_t Problem::*empty : {&Problem::num_seqs, &Problem::q_len}) {
    Call call;
    call.problem.*empty = 0;
    call.inputs = Inputs();
    call.expect_accepted();
  }
}

TEST(ValidateTest, KvLensLieBetweenZeroAndMaxKvLen) {
  for (const std::int32_t bad : {-1, 101, std::numeric_limits<std::int32_t>::min()}) {
    Call call;
    call.kv_lens[1] = bad;
    call.expect_refused_input("kv_lens[1]", std::to_string(bad));
  }
  Call default_lens;
  default_lens.inputs.kv_lens = nullptr;
  default_lens.expect_accepted();
}

TEST(ValidateTest, KvLenLiesBetweenZeroAndMaxKvLenAndBoundsTheLengths) {
  for (const std::int64_t bad : {-2, 101}) {
    Call call;
    call.inputs.kv_len = bad;
    call.expect_refused_input("kv_len", std::to_string(bad));
  }
  Call shorter;
  shorter.inputs.kv_len = 99;
  shorter.expect_refused_input("kv_lens[2]", "100");
  shorter.kv_lens[2] = 99;
  shorter.expect_accepted();
  Call uniform;
  uniform.inputs.kv_lens = nullptr;
  uniform.inputs.kv_len = 0;
  uniform.inputs.k.data = uniform.inputs.v.data = nullptr;
  uniform.expect_accepted();
  uniform.inputs.kv_len = 1;
  uniform.expect_refused_input("k.data", "null");
}

TEST(ValidateTest, KvStartsLieBetweenZeroAndTheLengthOfTheirSequence) {
  Call call;
  call.inputs.kv_starts = call.kv_starts.data();
  call.expect_accepted();
  call.kv_starts[1] = 51;
  call.expect_refused_input("kv_starts[1]", "51");
  call.kv_starts[1] = -1;
  call.expect_refused_input("kv_starts[1]", "-1");
  call.kv_starts = {1, 0, 0};
  call.inputs.kv_starts = call.kv_starts.data();
  call.expect_refused_input("kv_starts[0]", "1");
}

TEST(ValidateTest, WhatTheProblemDoesNotAnnounceIsRefusedAndWhatItAnnouncesIsRequired) {
  struct Optional {
    const char* name;
    std::function<void(Problem&)> announce;
    std::function<void(Inputs&, const float*)> give;
  };
  const Optional optionals[] = {
      {"sinks", [](Problem& p) { p.has_sinks = true; }, [](Inputs& in, const float* x) { in.sinks = x; }},
      {"alibi_slopes", [](Problem& p) { p.has_alibi = true; }, [](Inputs& in, const float* x) { in.alibi_slopes = x; }},
      {"mask", [](Problem& p) { p.mask = MaskKind::boolean; }, [](Inputs& in, const float* x) { in.mask = x; }},
      {"k_scales", [](Problem& p) { p.k_format = KvFormat::f8_e4m3; },
       [](Inputs& in, const float* x) { in.k_scales.data = x; }},
      {"v_scales", [](Problem& p) { p.v_format = KvFormat::f8_e4m3; },
       [](Inputs& in, const float* x) { in.v_scales.data = x; }},
  };
  for (const Optional& optional : optionals) {
    Call call;
    optional.give(call.inputs, call.data);
    call.expect_refused_input(optional.name, "a pointer");
    optional.announce(call.problem);
    call.expect_accepted();
    call.inputs = Call().inputs;
    call.inputs.kv_lens = call.kv_lens.data();
    call.inputs.q.data = call.inputs.k.data = call.inputs.v.data = call.data;
    call.expect_refused_input(optional.name, "null");
  }

  Call slopes;
  slopes.problem.mask = MaskKind::additive;
  slopes.inputs.mask = slopes.data;
  slopes.inputs.mask_slopes = slopes.data;
  slopes.expect_refused_input("mask_slopes", "a pointer");
  slopes.problem.has_mask_slopes = true;
  slopes.expect_accepted();
  slopes.inputs.mask_slopes = nullptr;
  slopes.expect_refused_input("mask_slopes", "null");

  Call mlx;
  mlx.problem.k_format = KvFormat::mlx_int8;
  mlx.problem.quant_group = 32;
  mlx.inputs.k_scales.data = mlx.data;
  mlx.expect_refused_input("k_biases", "null");
  mlx.inputs.k_biases.data = mlx.data;
  mlx.expect_accepted();
  mlx.inputs.v_biases.data = mlx.data;
  mlx.expect_refused_input("v_biases", "a pointer");

  Call table;
  table.block_table.assign(21, 0);
  table.inputs.block_table = table.block_table.data();
  table.expect_refused_input("block_table", "a pointer");

  Call unannounced_segments;
  unannounced_segments.add_segment({0, 1, 0, 0, 10});
  unannounced_segments.problem.has_segments = false;
  unannounced_segments.expect_refused_input("segments", "a pointer");
}

TEST(ValidateTest, EveryPageInUseExistsAndUnusedEntriesAreNotRead) {
  Call call;
  call.make_paged();
  call.expect_accepted();
  call.inputs.block_table = nullptr;
  call.expect_refused_input("block_table", "null");

  for (const std::int32_t bad : {-1, 5, std::numeric_limits<std::int32_t>::max()}) {
    Call broken;
    broken.make_paged();
    broken.block_table[7 + 3] = bad;  // sequence 1 has 50 tokens: entries 0..3
    broken.expect_refused_input("block_table[10]", std::to_string(bad));
    broken.block_table[7 + 3] = 0;
    broken.block_table[7 + 4] = bad;
    broken.expect_accepted();
  }

  Call short_rows;
  short_rows.make_paged();
  short_rows.inputs.block_table_stride = 6;  // sequence 2 has 100 tokens: 7 pages
  short_rows.expect_refused_input("block_table_stride", "6");
}

TEST(ValidateTest, SegmentsStayInsideTheBatchAndTheCache) {
  Call call;
  call.add_segment({0, 3, 2, 0, 100});
  call.add_segment({1, 1, 0, 10, 10});
  call.expect_accepted();
  struct Bad {
    Segment segment;
    const char* argument;
    const char* given;
  };
  const Bad bad[] = {
      {{-1, 1, 0, 0, 1}, "segments[0].seq_begin/seq_end", "-1..1"},
      {{2, 1, 0, 0, 1}, "segments[0].seq_begin/seq_end", "2..1"},
      {{0, 4, 0, 0, 1}, "segments[0].seq_begin/seq_end", "0..4"},
      {{0, 1, -1, 0, 1}, "segments[0].kv_seq", "-1"},
      {{0, 1, 3, 0, 1}, "segments[0].kv_seq", "3"},
      {{0, 1, 0, -1, 1}, "segments[0].token_begin/token_end", "-1..1"},
      {{0, 1, 0, 2, 1}, "segments[0].token_begin/token_end", "2..1"},
      {{0, 1, 0, 0, 101}, "segments[0].token_begin/token_end", "0..101"},
  };
  for (const Bad& b : bad) {
    Call broken;
    broken.add_segment(b.segment);
    broken.expect_refused_input(b.argument, b.given);
  }
  Call negative;
  negative.problem.has_segments = true;
  negative.inputs.num_segments = -1;
  negative.expect_refused_input("num_segments", "-1");
}

TEST(ValidateTest, OutIsRequiredWheneverThereAreRows) {
  Problem p = validate(valid_problem());
  Outputs outputs;
  expect_refused([&] { validate_outputs(p, outputs); }, "out", "null");
  float out = 0.0F;
  outputs.out = &out;
  EXPECT_NO_THROW(validate_outputs(p, outputs)) << "lse is optional";
  p.q_len = 0;
  outputs.out = nullptr;
  EXPECT_NO_THROW(validate_outputs(p, outputs));
}

}  // namespace
}  // namespace kvonce::core
