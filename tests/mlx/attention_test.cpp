// integrations/mlx without a GPU: errors, what goes to MLX, and the text that MLX would compile.
#include <gtest/gtest.h>
#include <mlx/export.h>
#include <mlx/fast.h>
#include <mlx/ops.h>
#include <mlx/random.h>
#include <mlx/transforms.h>

#include <iostream>
#include <sstream>

#include "kvonce_mlx.hpp"
#include "launch.hpp"

namespace kvonce::mlx {
namespace {

namespace mx = ::mlx::core;

mx::array normal(const mx::Shape& shape, mx::Dtype dtype = mx::float32) {
  return mx::astype(mx::random::normal(shape), dtype);
}

struct Tensors {
  mx::array q = normal({2, 8, 1, 64});
  mx::array k = normal({2, 2, 50, 64});
  mx::array v = normal({2, 2, 50, 64});
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(MlxAttentionTest, ErrorsNameTheArgument) {
  const Tensors t;
  const auto expect = [&](const std::string& argument, const std::function<void()>& call) {
    const std::string message = error_of(call);
    EXPECT_EQ(message.find("[kvonce::mlx::scaled_dot_product_attention] " + argument + ": got "), 0U) << message;
    EXPECT_NE(message.find(", allowed: "), std::string::npos) << message;
  };
  expect("queries", [&] { scaled_dot_product_attention(mx::squeeze(t.q, 2), t.k, t.v, 1.0F); });
  expect("queries",
         [&] { scaled_dot_product_attention(mx::astype(t.q, mx::float64, mx::Device::cpu), t.k, t.v, 1.0F); });
  expect("keys", [&] { scaled_dot_product_attention(t.q, mx::astype(t.k, mx::int32), t.v, 1.0F); });
  expect("keys", [&] { scaled_dot_product_attention(t.q, normal({1, 2, 50, 64}), t.v, 1.0F); });
  expect("keys", [&] { scaled_dot_product_attention(t.q, normal({2, 2, 50, 32}), t.v, 1.0F); });
  expect("keys", [&] { scaled_dot_product_attention(t.q, normal({2, 3, 50, 64}), normal({2, 3, 50, 64}), 1.0F); });
  expect("values", [&] { scaled_dot_product_attention(t.q, t.k, normal({2, 2, 49, 64}), 1.0F); });
  expect("mask_mode", [&] { scaled_dot_product_attention(t.q, t.k, t.v, 1.0F, "upper"); });
  expect("mask_arr", [&] { scaled_dot_product_attention(t.q, t.k, t.v, 1.0F, "array"); });
  expect("mask_arr", [&] { scaled_dot_product_attention(t.q, t.k, t.v, 1.0F, "causal", mx::zeros({1, 50})); });
  expect("mask_arr", [&] { scaled_dot_product_attention(t.q, t.k, t.v, 1.0F, "", mx::zeros({3, 50})); });
  expect("mask_arr", [&] {
    scaled_dot_product_attention(mx::astype(t.q, mx::float16), mx::astype(t.k, mx::float16),
                                 mx::astype(t.v, mx::float16), 1.0F, "", mx::zeros({1, 50}));
  });
  expect("sinks", [&] { scaled_dot_product_attention(t.q, t.k, t.v, 1.0F, "", {}, mx::zeros({7})); });
}

TEST(MlxAttentionTest, WithoutAGpuCallsGoToMlx) {
  const Tensors t;
  EXPECT_EQ(why_not_served(t.q, t.k, t.v), "a device that is not an Apple GPU");
  EXPECT_EQ(why_not_served(normal({2, 8, 65, 64}), t.k, t.v), "prefill: more than 64 query tokens");
  EXPECT_EQ(why_not_served(normal({2, 8, 51, 64}), t.k, t.v, "causal"), "a row that sees no key");
  EXPECT_EQ(why_not_served(normal({1, 1, 1, 4}), normal({1, 1, 3, 4}), normal({1, 1, 3, 4})),
            "fewer than 8 elements of q, K or V");
  EXPECT_EQ(why_not_served(mx::astype(t.q, mx::float16), t.k, mx::astype(t.v, mx::float16)),
            "K and V of other dtypes than the result");
  const std::vector<std::pair<std::string, std::optional<mx::array>>> masks = {
      {"", std::nullopt},
      {"causal", std::nullopt},
      {"", normal({1, 50})},
      {"array", mx::greater(normal({1, 50}), mx::array(0.0F))}};
  for (const auto& [mode, mask] : masks) {
    const auto got = scaled_dot_product_attention(t.q, t.k, t.v, 0.125F, mode, mask, normal({8}));
    EXPECT_EQ(got.shape(), (mx::Shape{2, 8, 1, 64}));
    const auto plain = scaled_dot_product_attention(t.q, t.k, t.v, 0.125F, mode, mask);
    const auto expected = mx::fast::scaled_dot_product_attention(t.q, t.k, t.v, 0.125F, mask ? "array" : mode, mask);
    EXPECT_TRUE(mx::array_equal(plain, expected).item<bool>());
  }
}

/// What `call` prints to std::cout.
std::string printed(const std::function<void()>& call) {
  std::ostringstream stream;
  std::streambuf* const kept = std::cout.rdbuf(stream.rdbuf());
  call();
  std::cout.rdbuf(kept);
  return stream.str();
}

TEST(MlxAttentionTest, KernelsAreWrittenAsTheParametersSay) {
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    const Call call{normal({1, 32, 1, 128}, dtype),
                    normal({1, 4, 300, 128}, dtype),
                    normal({1, 4, 300, 128}, dtype),
                    mx::zeros({1, 300}, mx::bool_),
                    normal({32}),
                    0.1F,
                    false};
    const metal::Decision plan = plan_of(call, gpu_of_architecture("applegpu_g14s"));
    EXPECT_EQ(plan.read_factor, 1);
    // Outside of a trace MLX refuses kernels where there is no GPU.
    const std::string text = printed([&] {
      const auto traced = [&](const std::vector<mx::array>& arrays) {
        const auto [out, lse] =
            launch(plan, {arrays[0], arrays[1], arrays[2], call.mask, call.sinks, call.scale, call.causal}, {}, true);
        EXPECT_EQ(out.shape(), (mx::Shape{1, 32, 1, 128}));
        EXPECT_EQ(out.dtype(), dtype);
        EXPECT_EQ(lse.shape(), (mx::Shape{1, 32, 1}));
        EXPECT_EQ(lse.dtype(), mx::float32);
        return std::vector<mx::array>{out, lse};
      };
      mx::export_function([](const mx::ExportCallbackInput&) {}, traced,
                          std::vector<mx::array>{call.q, call.k, call.v});
    });
    const std::string type = dtype == mx::float32 ? "float" : dtype == mx::float16 ? "float16_t" : "bfloat16_t";
    for (const std::string& line :
         {"const device " + type + "* q [[buffer(0)]]",
          std::string("const constant int64_t* mask_strides [[buffer(9)]]"),
          std::string("const device bool* mask [[buffer(8)]]"),
          std::string("device float* partial_sums [[buffer(14)]]"), "device " + type + "* out [[buffer(4)]]",
          std::string("kvonce_metal::attend_") + to_string(plan.body) + "<T, kDimQk, kDimV"}) {
      EXPECT_NE(text.find(line), std::string::npos) << line;
    }
    for (const char c : text) ASSERT_LT(static_cast<unsigned char>(c), 128);
    EXPECT_EQ(text.find("#include"), std::string::npos);
  }
}

TEST(MlxAttentionTest, GradientsAreThoseOfMlx) {
  const Tensors t;
  const std::optional<mx::array> mask = normal({1, 50});
  const std::optional<mx::array> sinks = normal({8});
  const Call call{t.q, t.k, t.v, mask, sinks, 0.125F, false};
  const metal::Decision plan = plan_of(call, gpu_of_architecture("applegpu_g14s"));
  using Arrays = std::vector<mx::array>;
  const auto ours = [&](const Arrays& a) {
    return Arrays{attend(plan, {a[0], a[1], a[2], a[3], a[4], 0.125F, false}, {})};
  };
  const auto by_mlx = [&](const Arrays& a) {
    return Arrays{mx::fast::scaled_dot_product_attention(a[0], a[1], a[2], 0.125F, "array", a[3], a[4])};
  };
  const Arrays primals = {t.q, t.k, t.v, *mask, *sinks};
  const auto compare = [&](const auto& gradients_of) {
    // A trace may contain kernels that it does not run.
    const std::string file = testing::TempDir() + "/kvonce_mlx_gradients.mlxfn";
    mx::export_function(
        file, [&](const Arrays& a) { return gradients_of(ours, a); }, primals);
    const Arrays got = mx::import_function(file)(primals);
    const Arrays expected = gradients_of(by_mlx, primals);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(mx::allclose(got[i], expected[i], 1e-4, 1e-5).item<bool>()) << i;
      EXPECT_GT(mx::max(mx::abs(expected[i])).item<float>(), 0.0F);
    }
  };
  using Function = std::function<Arrays(const Arrays&)>;
  compare([&](const Function& f, const Arrays& a) { return mx::vjp(f, a, {mx::ones({2, 8, 1, 64})}).second; });
}

TEST(MlxAttentionTest, GenerationsBecomeFamilies) {
  for (const auto& [architecture, family] :
       std::initializer_list<std::pair<std::string, std::string>>{{"applegpu_g13g", "apple7"},
                                                                  {"applegpu_g14s", "apple8"},
                                                                  {"applegpu_g15d", "apple9"},
                                                                  {"applegpu_g16s", "apple9"},
                                                                  {"applegpu_g17s", "apple10"},
                                                                  {"something else", "apple7"}}) {
    EXPECT_EQ(gpu_of_architecture(architecture).target, family) << architecture;
  }
}

}  // namespace
}  // namespace kvonce::mlx
