// The rules of the MLX formats' scales and biases.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/validate.hpp"
#include "kvonce/plan.hpp"

namespace kvonce::core {
namespace {

Problem affine_problem(KvFormat format = KvFormat::mlx_int4) {
  Problem p;
  p.num_q_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim_qk = 128;
  p.max_kv_len = 100;
  p.k_format = p.v_format = format;
  p.quant_group = 64;
  return p;
}

void expect_refused(const std::function<void()>& call, const std::string& argument, const std::string& given) {
  try {
    call();
    ADD_FAILURE() << argument << ": " << given << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    const std::string text = error.what();
    EXPECT_NE(text.find(argument), std::string::npos) << text;
    EXPECT_NE(text.find(given), std::string::npos) << text;
  }
}

struct Call {
  Problem problem = validate(affine_problem());
  float data[4] = {};
  Inputs inputs;

  Call() {
    inputs.q = {data, 512, 128, 128};
    inputs.k = inputs.v = {data, 25600, 12800, 128};
    inputs.k_scales = inputs.k_biases = inputs.v_scales = inputs.v_biases = {data, 400, 200, 2};
  }

  void expect_accepted() const { EXPECT_NO_THROW(validate_inputs(problem, inputs)); }
  void expect_refused_input(const std::string& argument, const std::string& given) const {
    expect_refused([this] { validate_inputs(problem, inputs); }, argument, given);
  }
};

constexpr TensorView Inputs::*kSides[] = {&Inputs::k_scales, &Inputs::k_biases, &Inputs::v_scales, &Inputs::v_biases};
constexpr const char* kSideNames[] = {"k_scales", "k_biases", "v_scales", "v_biases"};

TEST(ValidateAffineTest, ScalesDtypeBelongsToMlxFormatsOnly) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Problem p = affine_problem();
    p.scales_dtype = dtype;
    EXPECT_NO_THROW(validate(p));
    p.k_format = KvFormat::f16;
    EXPECT_NO_THROW(validate(p)) << "V is still an MLX format";
    p.v_format = KvFormat::f16;
    p.quant_group = 0;
    expect_refused([&p] { validate(p); }, "scales_dtype", std::string(to_string(dtype)));
  }
}

TEST(ValidateAffineTest, EachOfTheFourArraysIsNeeded) {
  Call().expect_accepted();
  for (std::size_t i = 0; i < 4; ++i) {
    Call call;
    (call.inputs.*kSides[i]).data = nullptr;
    call.expect_refused_input(kSideNames[i], "null");
    call.inputs.kv_len = 0;
    call.expect_accepted();
  }
}

TEST(ValidateAffineTest, ArraysOfAnotherFormatAreRefused) {
  for (std::size_t i = 0; i < 4; ++i) {
    Call call;
    (i < 2 ? call.problem.k_format : call.problem.v_format) = KvFormat::f16;
    for (std::size_t j = 0; j < 4; ++j) {
      if (j / 2 == i / 2 && j != i) (call.inputs.*kSides[j]).data = nullptr;
    }
    call.expect_refused_input(kSideNames[i], "a pointer");
    (call.inputs.*kSides[i]).data = nullptr;
    call.expect_accepted();
  }
}

TEST(ValidateAffineTest, RowsOfNibblesBeginAtWholeBytes) {
  for (TensorView Inputs::*tensor : {&Inputs::k, &Inputs::v}) {
    for (std::int64_t TensorView::*stride :
         {&TensorView::seq_stride, &TensorView::head_stride, &TensorView::token_stride}) {
      Call call;
      call.inputs.*tensor.*stride = 131;
      call.expect_refused_input(tensor == &Inputs::k ? "k." : "v.", "131");
      (tensor == &Inputs::k ? call.problem.k_format : call.problem.v_format) = KvFormat::mlx_int8;
      call.expect_accepted();
    }
  }
}

TEST(ValidateAffineTest, APrefixOfKHasItsScalesAndBiases) {
  Call call;
  call.problem.v_is_k_prefix = true;
  call.expect_accepted();
  call.inputs.v_scales.token_stride = 4;
  call.expect_refused_input("v_scales", "k_scales itself");
  call.inputs.v_scales = call.inputs.k_scales;
  call.inputs.v_biases.data = call.data + 1;
  call.expect_refused_input("v_biases", "k_biases itself");
}

TEST(ValidateAffineTest, KvBytesCountScalesAndBiases) {
  Device device;
  for (const Device& candidate : devices()) {
    if (candidate.target == "portable") device = candidate;
  }
  Problem p = affine_problem(KvFormat::mlx_int8);
  p.scales_dtype = DType::f16;
  EXPECT_EQ(make_plan(p, device).max_kv_bytes(), 2 * 100 * 2 * (128 + 2 * 2 * 2));
  EXPECT_NE(make_plan(p, device).explain().find("scales and biases f16 per 64 values"), std::string::npos);
  p.scales_dtype = DType::f32;
  p.v_format = KvFormat::mlx_int4;
  EXPECT_EQ(make_plan(p, device).max_kv_bytes(), 2 * 100 * (128 + 64 + 2 * 2 * 2 * 4));
  p.k_format = KvFormat::f16;
  p.quant_group = 32;
  EXPECT_EQ(make_plan(p, device).max_kv_bytes(), 2 * 100 * (256 + 64 + 4 * 2 * 4));
}

}  // namespace
}  // namespace kvonce::core
