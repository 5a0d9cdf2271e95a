#include "kvonce/case_string.hpp"

#include <gtest/gtest.h>

#include <string>

namespace kvonce::tool {
namespace {

std::string message_of(const std::string& text) {
  try {
    parse_case(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "'" << text << "' was accepted";
  return "";
}

TEST(CaseStringTest, ReadsEveryToken) {
  const CaseSpec spec = parse_case("32q/4kv d192x128 kv=32768 q=3 seqs=2 dtype=bf16 causal=0");
  EXPECT_EQ(spec.num_q_heads, 32);
  EXPECT_EQ(spec.num_kv_heads, 4);
  EXPECT_EQ(spec.head_dim_qk, 192);
  EXPECT_EQ(spec.head_dim_v, 128);
  EXPECT_EQ(spec.kv_len, 32768);
  EXPECT_EQ(spec.q_len, 3);
  EXPECT_EQ(spec.num_seqs, 2);
  EXPECT_EQ(spec.dtype, KvFormat::bf16);
  EXPECT_FALSE(spec.causal);
}

TEST(CaseStringTest, LeavesOptionalTokensAtTheirDefaults) {
  const CaseSpec spec = parse_case("9q/3kv d64 kv=0");
  EXPECT_EQ(spec.head_dim_v, 64);
  EXPECT_EQ(spec.kv_len, 0);
  EXPECT_EQ(spec.q_len, 1);
  EXPECT_EQ(spec.num_seqs, 1);
  EXPECT_FALSE(spec.dtype.has_value());
  EXPECT_TRUE(spec.causal);
}

TEST(CaseStringTest, TakesTokensInAnyOrderAndAnySpaces) {
  EXPECT_EQ(parse_case("  kv=8\td64   q=2 6q/2kv\n"), parse_case("6q/2kv d64 kv=8 q=2"));
}

TEST(CaseStringTest, PrintsWhatItReads) {
  for (const char* text :
       {"32q/4kv d128 kv=32768 q=1 seqs=1", "32q/4kv d192x128 kv=1 q=64 seqs=5 dtype=q8_0",
        "1q/1kv d1 kv=2147483647 q=0 seqs=0 dtype=f32 causal=0", "8q/2kv d64 kv=9 q=1 seqs=1 layout=nhd",
        "8q/2kv d64 kv=9 q=1 seqs=1 dtype=f16 v_dtype=q4_0 causal=0 mask=additive softcap=30 alibi=1 sinks=1",
        "8q/2kv d64 kv=9 q=4 seqs=1 mask=tree softcap=1.5", "8q/2kv d64 kv=9 q=1 seqs=1 mask=boolean"}) {
    EXPECT_EQ(to_string(parse_case(text)), text);
  }
}

TEST(CaseStringTest, MlxFormatsHaveF16ScalesPer64Values) {
  for (const char* text : {"8q/2kv d64 kv=9 dtype=mlx_int8", "8q/2kv d64 kv=9 v_dtype=mlx_int4"}) {
    const Problem p = to_problem(parse_case(text), KvFormat::f16, DType::f32);
    EXPECT_EQ(p.quant_group, 64);
    EXPECT_EQ(p.scales_dtype, DType::f16);
  }
  EXPECT_EQ(to_problem(parse_case("8q/2kv d64 kv=9"), KvFormat::f16, DType::f16).quant_group, 0);
}

TEST(CaseStringTest, WhatChangesScoresReachesTheProblem) {
  const Problem p = to_problem(parse_case("8q/2kv d64 kv=9 v_dtype=q8_0 mask=additive softcap=30 alibi=1 sinks=1"),
                               KvFormat::f16, DType::f16);
  EXPECT_EQ(p.k_format, KvFormat::f16);
  EXPECT_EQ(p.v_format, KvFormat::q8_0);
  EXPECT_EQ(p.mask, MaskKind::additive);
  EXPECT_EQ(p.mask_dtype, DType::f16);
  EXPECT_EQ(p.softcap, 30.0F);
  EXPECT_TRUE(p.has_alibi && p.has_sinks);
}

TEST(CaseStringTest, EveryFormatNameIsRead) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::f8_e4m3, KvFormat::mlx_int8,
                                KvFormat::mlx_int4, KvFormat::q8_0, KvFormat::q4_0}) {
    EXPECT_EQ(parse_format(kvonce::to_string(format)), format);
    EXPECT_NE(format_names().find(kvonce::to_string(format)), std::string::npos);
  }
  EXPECT_FALSE(parse_format("f17").has_value());
}

TEST(CaseStringTest, RefusesWrongTokensByName) {
  const struct {
    const char* text;
    const char* named;
  } cases[] = {{"32q/4kv d128 kv=x", "'kv=x'"},
               {"32q/4kv d128 kv=", "'kv='"},
               {"32q/4kv d128 kv=-1", "'kv=-1'"},
               {"32q/4kv d128 kv=2147483648", "'kv=2147483648'"},
               {"32q/4kv d128 kv=99999999999999999999", "99999999999999999999"},
               {"32q/4kv d128 kv=8 kv=9", "'kv=9'"},
               {"32q/4kv d128 d64 kv=8", "'d64'"},
               {"32q/0kv d128 kv=8", "'32q/0kv'"},
               {"32/4 d128 kv=8", "'32/4'"},
               {"32q/4kv/2 d128 kv=8", "'32q/4kv/2'"},
               {"32q/4kv d kv=8", "'d'"},
               {"32q/4kv d128x kv=8", "'d128x'"},
               {"32q/4kv d128x64x2 kv=8", "'d128x64x2'"},
               {"32q/4kv d0 kv=8", "'d0'"},
               {"32q/4kv d128 kv=8 dtype=f17", "'dtype=f17'"},
               {"32q/4kv d128 kv=8 causal=2", "'causal=2'"},
               {"32q/4kv d128 kv=8 layout=dhn", "'layout=dhn'"},
               {"32q/4kv d128 kv=8 page=16", "'page=16'"},
               {"32q/4kv d128 kv=8 mask=bias", "'mask=bias'"},
               {"32q/4kv d128 kv=8 softcap=-1", "'softcap=-1'"},
               {"32q/4kv d128 kv=8 softcap=30x", "'softcap=30x'"},
               {"32q/4kv d128 kv=8 alibi=yes", "'alibi=yes'"},
               {"32q/4kv d128 kv=8 hello", "'hello'"},
               {"32q/4kv d128 kv=+8", "'kv=+8'"},
               {"32q/4kv d128 kv=8.0", "'kv=8.0'"}};
  for (const auto& wrong : cases) {
    EXPECT_NE(message_of(wrong.text).find(wrong.named), std::string::npos) << wrong.text;
  }
}

TEST(CaseStringTest, MessagesAreOneShortLineWhateverTheText) {
  for (const std::string& text : {std::string("32q/4kv d128\n\tq=1"), std::string("32q/4kv d\x1b[2J kv=8"),
                                  std::string("32q/4kv d128 kv=\x01"), std::string(100'000, 'x')}) {
    const std::string message = message_of(text);
    EXPECT_EQ(message.find_first_of("\n\t\x1b\x01"), std::string::npos) << message;
    EXPECT_LT(message.size(), 400U);
  }
}

TEST(CaseStringTest, SaysWhichRequiredTokenIsMissing) {
  EXPECT_NE(message_of("").find("heads"), std::string::npos);
  EXPECT_NE(message_of("d128 kv=8").find("heads"), std::string::npos);
  EXPECT_NE(message_of("32q/4kv kv=8").find("head dim"), std::string::npos);
  EXPECT_NE(message_of("32q/4kv d128 q=1").find("kv="), std::string::npos);
}

TEST(CaseStringTest, ProblemHasTheValuesOfTheCase) {
  const Problem problem =
      to_problem(parse_case("32q/4kv d192x128 kv=77 q=3 seqs=2 causal=0"), KvFormat::bf16, DType::f16);
  EXPECT_EQ(problem.num_q_heads, 32);
  EXPECT_EQ(problem.num_kv_heads, 4);
  EXPECT_EQ(problem.head_dim_qk, 192);
  EXPECT_EQ(problem.head_dim_v, 128);
  EXPECT_EQ(problem.max_kv_len, 77);
  EXPECT_EQ(problem.q_len, 3);
  EXPECT_EQ(problem.num_seqs, 2);
  EXPECT_FALSE(problem.causal);
  EXPECT_EQ(problem.k_format, KvFormat::bf16);
  EXPECT_EQ(problem.v_format, KvFormat::bf16);
  EXPECT_EQ(problem.q_dtype, DType::f16);
  EXPECT_EQ(problem.out_dtype, DType::f16);
  EXPECT_EQ(to_problem(parse_case("1q/1kv d8 kv=1 dtype=f32"), KvFormat::bf16, DType::f16).k_format, KvFormat::f32);
}

}  // namespace
}  // namespace kvonce::tool
