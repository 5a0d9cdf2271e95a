// The read factor that a launch states is what the shipped text does: every byte of K and V that some row sees is loaded from
// device memory exactly that often, and no other byte ever. Collectives and exponentials per pair are as documented.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "emulated_case.hpp"
#include "load_counter.hpp"

namespace kvonce::emulation {
namespace {

struct Shape {
  std::int64_t group;
  std::int64_t q_len;
  std::int64_t dim;
  Choice choice;
  std::int64_t expected_read_factor;
  std::int64_t window = 0;
  std::int64_t kv_start = 0;
};

Choice choice(Body body, std::int64_t row_tile, std::int64_t row_tiles, std::int64_t token_parts,
              std::int64_t num_chunks, std::int64_t chunk_tokens = 0) {
  return {body, row_tile, row_tiles, token_parts, num_chunks, chunk_tokens, 2, 5};
}

constexpr Body kV = Body::vector;
constexpr Body kM = Body::matrix;
constexpr Body kH = Body::per_head;

const Shape kShapes[] = {
    // One row tile, tokens shared by one or several simdgroups and threadgroups.
    {8, 1, 128, choice(kV, 8, 1, 1, 1), 1},
    {8, 1, 128, choice(kV, 8, 1, 8, 3), 1},
    {8, 1, 128, choice(kM, 8, 1, 4, 3), 1},
    {7, 1, 128, choice(kV, 8, 1, 3, 2), 1},
    {5, 1, 64, choice(kV, 8, 1, 16, 1), 1},
    {4, 1, 128, choice(kV, 4, 1, 4, 5), 1},
    {3, 1, 80, choice(kV, 4, 1, 2, 3), 1},
    {1, 1, 128, choice(kV, 1, 1, 4, 3), 1},
    {2, 1, 64, choice(kV, 2, 1, 4, 3), 1},
    {16, 1, 128, choice(kV, 16, 1, 4, 3), 1},
    {8, 1, 96, choice(kM, 8, 1, 2, 2, 100), 1},
    {3, 1, 80, choice(kM, 8, 1, 4, 3), 1},
    // Row tiles that share the tokens through threadgroup memory.
    {16, 1, 128, choice(kV, 8, 2, 1, 3), 1},
    {8, 4, 64, choice(kV, 8, 4, 1, 2), 1},
    {8, 4, 128, choice(kM, 8, 4, 1, 2), 1},
    {16, 4, 64, choice(kM, 8, 8, 1, 2), 1},
    {71, 1, 64, choice(kV, 8, 16, 1, 2), 1},
    {5, 5, 80, choice(kV, 4, 16, 1, 2, 64), 1},
    // More rows than a threadgroup holds.
    {16, 1, 128, choice(kV, 8, 1, 4, 3), 2},
    {71, 1, 64, choice(kV, 8, 1, 2, 2), 9},
    {71, 1, 64, choice(kM, 8, 4, 1, 2), 3},
    {12, 2, 64, choice(kV, 8, 2, 1, 1), 2},
    // Windows and left padding.
    {8, 1, 128, choice(kV, 8, 1, 4, 2), 1, 77, 0},
    {8, 3, 64, choice(kM, 8, 4, 1, 2), 1, 77, 0},
    {5, 3, 80, choice(kV, 8, 2, 1, 2), 1, 100, 0},
    {4, 1, 64, choice(kM, 8, 1, 4, 2), 1, 0, 128},
    {7, 2, 128, choice(kV, 8, 2, 1, 3, 50), 1, 0, 131},
    {8, 1, 128, choice(kV, 8, 1, 2, 2), 1, 90, 250},
    // The baseline: every row reads all of it.
    {8, 1, 128, choice(kH, 1, 8, 1, 3), 8},
    {5, 1, 64, choice(kH, 1, 5, 1, 7), 5},
    {7, 1, 80, choice(kH, 1, 4, 1, 2), 7},
    {1, 1, 128, choice(kH, 1, 1, 1, 4), 1},
    {6, 2, 64, choice(kH, 1, 32, 1, 4), 12},
    {4, 1, 64, choice(kH, 1, 4, 1, 2), 4, 77, 0},
};

constexpr std::int64_t kCapacity = 300;
constexpr std::int64_t kValid = 277;

// Tokens that fit threadgroup memory in pieces of a step alone, K and V one after the other.
const Shape kPieces[] = {
    {8, 1, 512, choice(kV, 1, 8, 1, 2), 1},         {3, 2, 512, choice(kV, 1, 16, 1, 3, 70), 1},
    {16, 1, 512, choice(kV, 1, 8, 1, 1), 2},        {4, 1, 512, choice(kV, 1, 4, 1, 2), 1, 77, 0},
    {4, 2, 512, choice(kV, 1, 8, 1, 2), 1, 0, 131},
};
const Shape kPiecesF32[] = {
    {8, 1, 320, choice(kV, 2, 4, 1, 2), 1},
    {5, 3, 320, choice(kV, 2, 8, 1, 2), 1},
};

void expect_read_factor(const Shape& shape, DType dtype) {
  conformance::CaseSpec spec;
  Problem& p = spec.problem;
  p.num_kv_heads = 2;
  p.num_q_heads = 2 * shape.group;
  p.q_len = shape.q_len;
  p.head_dim_qk = shape.dim;
  p.head_dim_v = shape.dim;
  p.max_kv_len = kCapacity;
  p.q_dtype = dtype;
  p.out_dtype = dtype;
  p.k_format = static_cast<KvFormat>(dtype);
  p.v_format = p.k_format;
  p.window = shape.window;
  // Causal rows of several blocks do not all see the newest tokens; in one block some row does.
  p.causal = shape.expected_read_factor == 1 || shape.q_len == 1;
  spec.kv_lens = {static_cast<std::int32_t>(kValid)};
  spec.kv_starts = {static_cast<std::int32_t>(shape.kv_start)};
  spec.name = shape.choice.name() + " group " + std::to_string(shape.group) + " q_len " + std::to_string(shape.q_len) +
              " d" + std::to_string(shape.dim) + " window " + std::to_string(shape.window);
  SCOPED_TRACE(spec.name);
  conformance::CaseTensors tensors(spec);
  ASSERT_EQ(make_launch(p, tensors.inputs(), shape.choice).read_factor, shape.expected_read_factor);

  const std::int64_t element = dtype == DType::f32 ? 4 : 2;
  const Inputs& inputs = tensors.inputs();
  for (std::int64_t head = 0; head < 2; ++head) {
    const auto counter_of = [&](const TensorView& view) {
      const auto* base = static_cast<const unsigned char*>(view.data) + head * view.head_stride * element;
      return test::LoadCounter(base, static_cast<std::size_t>(kCapacity * shape.dim * element),
                               static_cast<std::size_t>(shape.dim * element), 0);
    };
    ASSERT_EQ(inputs.k.token_stride, shape.dim);
    ASSERT_EQ(inputs.v.token_stride, shape.dim);
    const test::LoadCounter of_k = counter_of(inputs.k);
    const test::LoadCounter of_v = counter_of(inputs.v);
    ASSERT_EQ(run_emulated(spec, tensors, shape.choice), "");
    const std::int64_t oldest = shape.window > 0 ? kValid - shape.q_len - shape.window + 1 : 0;
    const std::int64_t first_seen = std::max(shape.kv_start, oldest);
    const std::int64_t pieces_of_a_row = shape.dim * element / 2;
    for (const auto* counter : {&of_k, &of_v}) {
      for (std::size_t piece = 0; piece < counter->fetches().size(); ++piece) {
        const std::int64_t token = static_cast<std::int64_t>(piece) / pieces_of_a_row;
        const bool seen = token >= first_seen && token < kValid;
        ASSERT_EQ(counter->fetches()[piece], seen ? shape.expected_read_factor : 0)
            << (counter == &of_k ? "K" : "V") << " head " << head << " token " << token << " piece "
            << static_cast<std::int64_t>(piece) % pieces_of_a_row;
      }
    }
  }
}

TEST(MetalReadFactorTest, EveryByteIsLoadedAsOftenAsTheLaunchSays) {
  for (const Shape& shape : kShapes) expect_read_factor(shape, DType::f16);
  for (const Shape& shape : kShapes) {
    // Those that instances.def has in float32 too.
    if (shape.choice.row_tile == 8 && (shape.dim == 64 || shape.dim == 128)) expect_read_factor(shape, DType::f32);
  }
}

TEST(MetalReadFactorTest, StepsInPiecesAreLoadedOnceToo) {
  static_assert(kvonce_metal::piece_tokens(false, 1, 512, 512, 2) == 16);
  static_assert(kvonce_metal::piece_tokens(false, 2, 320, 320, 4) == 8);
  static_assert(kvonce_metal::piece_tokens(false, 8, 512, 512, 2) == 0);
  for (const Shape& shape : kPieces) expect_read_factor(shape, DType::f16);
  for (const Shape& shape : kPiecesF32) expect_read_factor(shape, DType::f32);
}

// MLX's affine caches: the bodies load the codes byte by byte, so each of a piece's two bytes counts.
TEST(MetalReadFactorTest, EveryByteOfAffineCodesIsLoadedOnce) {
  struct AffineShape {
    KvFormat format;
    std::int64_t group, dim;
    Choice choice;
  };
  const AffineShape shapes[] = {
      {KvFormat::mlx_int8, 8, 128, choice(kV, 8, 1, 4, 2)},  {KvFormat::mlx_int4, 8, 128, choice(kV, 8, 1, 1, 3)},
      {KvFormat::mlx_int4, 7, 64, choice(kV, 8, 1, 4, 2)},   {KvFormat::mlx_int8, 8, 128, choice(kM, 8, 1, 4, 2)},
      {KvFormat::mlx_int4, 16, 128, choice(kM, 8, 2, 1, 2)}, {KvFormat::mlx_int8, 16, 128, choice(kV, 8, 2, 1, 2)},
      {KvFormat::mlx_int8, 8, 512, choice(kV, 1, 8, 1, 2)}};
  for (const AffineShape& shape : shapes) {
    conformance::CaseSpec spec;
    Problem& p = spec.problem;
    p.num_kv_heads = 1;
    p.num_q_heads = shape.group;
    p.head_dim_qk = shape.dim;
    p.head_dim_v = shape.dim;
    p.max_kv_len = kCapacity;
    p.q_dtype = p.out_dtype = p.scales_dtype = DType::f16;
    p.k_format = p.v_format = shape.format;
    p.quant_group = 64;
    spec.kv_lens = {static_cast<std::int32_t>(kValid)};
    SCOPED_TRACE(shape.choice.name() + " " + std::string(kvonce::to_string(shape.format)));
    conformance::CaseTensors tensors(spec);
    const std::int64_t row_bytes = format_bytes(shape.format, shape.dim);
    const auto bytes = static_cast<std::size_t>(kCapacity * row_bytes);
    const test::LoadCounter of_k(tensors.inputs().k.data, bytes, static_cast<std::size_t>(row_bytes), 0);
    const test::LoadCounter of_v(tensors.inputs().v.data, bytes, static_cast<std::size_t>(row_bytes), 0);
    ASSERT_EQ(run_emulated(spec, tensors, shape.choice), "");
    for (const auto* counter : {&of_k, &of_v}) {
      for (std::size_t piece = 0; piece < counter->fetches().size(); ++piece) {
        const bool seen = static_cast<std::int64_t>(piece) * 2 < kValid * row_bytes;
        ASSERT_EQ(counter->fetches()[piece], seen ? 2 : 0) << (counter == &of_k ? "K" : "V") << " piece " << piece;
      }
    }
  }
}

// One stream, 8 rows, kv_len tokens, one simdgroup.
Counts counts_of(Body body, std::int64_t kv_len, std::int64_t dim) {
  conformance::CaseSpec spec;
  Problem& p = spec.problem;
  p.num_kv_heads = 1;
  p.num_q_heads = 8;
  p.head_dim_qk = dim;
  p.head_dim_v = dim;
  p.max_kv_len = kv_len;
  p.q_dtype = DType::f16;
  p.out_dtype = DType::f16;
  p.k_format = KvFormat::f16;
  p.v_format = KvFormat::f16;
  const conformance::CaseTensors tensors(spec);
  Choice one = choice(body, body == kH ? 1 : 8, body == kH ? 8 : 1, 1, 1);
  const Launch launch = make_launch(p, tensors.inputs(), one);
  std::vector<std::uint16_t> out(static_cast<std::size_t>(8 * dim));
  std::vector<float> lse(8);
  Counts counted;
  EXPECT_EQ(run_launch(launch, tensors.inputs(), 3, out.data(), lse.data(), &counted), "");
  return counted;
}

// docs/kernel-metal.md. What two lengths differ by is free of what happens once.
TEST(MetalCountsTest, CollectivesAndExponentialsPerPair) {
  constexpr std::int64_t kPairs = 8 * 128;
  constexpr std::int64_t kDim = 128;
  const auto difference = [](Body body, auto of) {
    return static_cast<std::int64_t>(of(counts_of(body, 256, kDim)) - of(counts_of(body, 128, kDim)));
  };
  const auto collectives = [&](Body body, Collective operation) {
    return difference(body, [operation](const Counts& c) { return c.of(operation); });
  };
  // Exponential instructions: 32 lanes execute one together.
  const auto exponentials = [&](Body body) {
    return difference(body, [](const Counts& c) { return c.lane_exp2; }) / 32;
  };
  // vector, 8 rows: a step is 32 pairs: 31 + 2 exchanges, 8 + 32 broadcasts, 2 exponentials.
  EXPECT_EQ(collectives(kV, Collective::shuffle_xor), kPairs / 32 * 33);
  EXPECT_EQ(collectives(kV, Collective::shuffle), kPairs / 32 * 40);
  EXPECT_EQ(collectives(kV, Collective::sum), 0);
  EXPECT_EQ(exponentials(kV), kPairs / 32 * 2);
  // matrix: a step is 128 pairs: 2 exchanges, 2 * (dqk + dv) / 8 products, 5 exponentials.
  EXPECT_EQ(collectives(kM, Collective::shuffle_xor), kPairs / 128 * 2);
  EXPECT_EQ(collectives(kM, Collective::shuffle), 0);
  EXPECT_EQ(collectives(kM, Collective::matrix_multiply_add), kPairs / 128 * 2 * (2 * kDim / 8));
  EXPECT_EQ(exponentials(kM), kPairs / 128 * 5);
  // per_head: every pair takes a sum over the lanes and two exponentials.
  EXPECT_EQ(collectives(kH, Collective::sum), kPairs);
  EXPECT_EQ(exponentials(kH), kPairs * 2);
}

}  // namespace
}  // namespace kvonce::emulation
