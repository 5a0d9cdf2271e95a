// The read factor that a plan states is what the kernels do: every byte of K and V that some row sees is fetched exactly
// that often, and no other byte is ever loaded.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvonce/kvonce.hpp"
#include "load_counter.hpp"

namespace kvonce {
namespace {

struct Shape {
  std::int64_t group;
  std::int64_t q_len;
  std::int64_t head_dim;
  std::int64_t expected_read_factor;
  std::int64_t window = 0;
  std::int64_t kv_start = 0;
  std::int64_t hidden_begin = 0;  // a mask hides these tokens: whole steps of kMaskedStep tokens
  std::int64_t hidden_end = 0;
};

constexpr Shape kShapes[] = {
    {1, 1, 128, 1}, {2, 1, 64, 1},  {3, 1, 80, 1},   {4, 1, 128, 1},  {5, 1, 128, 1}, {7, 3, 64, 1},
    {8, 1, 128, 1}, {8, 4, 128, 1}, {12, 1, 72, 1},  {16, 2, 128, 1}, {32, 1, 64, 1}, {64, 1, 64, 1},
    {71, 1, 64, 2}, {16, 8, 64, 2}, {128, 1, 40, 2}, {24, 16, 64, 6},
};

// Windows and left padding whose first key lies inside a chunk, at its edge, in the last chunk; chunks have 128 tokens.
constexpr Shape kPartlySeen[] = {
    {1, 1, 128, 1, 1, 0},  {1, 1, 64, 1, 77, 0},  {4, 1, 128, 1, 78, 0}, {5, 3, 80, 1, 100, 0}, {8, 1, 64, 1, 200, 0},
    {8, 4, 128, 1, 16, 0}, {8, 1, 40, 1, 400, 0}, {4, 1, 64, 1, 0, 128}, {7, 2, 72, 1, 0, 300}, {8, 1, 128, 1, 90, 250},
};

// Hidden steps at a chunk's start, in its middle, a whole chunk and more, the end of the sequence.
constexpr std::int64_t kMaskedStep = 32;
constexpr Shape kMasked[] = {
    {1, 1, 128, 1, 0, 0, 0, 64},   {3, 1, 64, 1, 0, 0, 32, 96},   {4, 1, 128, 1, 0, 0, 96, 288},
    {8, 1, 64, 1, 0, 0, 128, 256}, {5, 3, 80, 1, 0, 0, 160, 192}, {14, 1, 64, 1, 0, 0, 256, 352},
};

constexpr std::int64_t kCapacity = 400;
constexpr std::int64_t kValid = 333;

bool is_mlx(KvFormat format) { return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4; }

// Values per unit of a stride.
std::int64_t unit_values(KvFormat format) { return format == KvFormat::q8_0 || format == KvFormat::q4_0 ? 32 : 1; }

constexpr std::int64_t kQuantGroup = 32;

// A tensor of both KV heads and how many bytes a token of one head has in it.
struct Watched {
  const char* name;
  std::vector<std::uint8_t> bytes;
  std::int64_t row_bytes;

  Watched(const char* its_name, std::int64_t its_row_bytes)
      : name(its_name),
        bytes(static_cast<std::size_t>(2 * kCapacity * its_row_bytes), std::uint8_t{0}),
        row_bytes(its_row_bytes) {}
  [[nodiscard]] std::int64_t head_bytes() const { return kCapacity * row_bytes; }
};

void expect_read_factor(const Device& device, KvFormat format, const Shape& shape) {
  Problem problem;
  problem.num_kv_heads = 2;
  problem.num_q_heads = 2 * shape.group;
  problem.q_len = shape.q_len;
  problem.head_dim_qk = shape.head_dim;
  problem.max_kv_len = kCapacity;
  problem.k_format = format;
  problem.v_format = format;
  if (is_mlx(format)) {
    problem.quant_group = kQuantGroup;
    problem.scales_dtype = DType::f16;
  }
  problem.window = shape.window;
  // Causal rows of several blocks do not all see the newest tokens; with one block some row does.
  problem.causal = shape.expected_read_factor == 1;
  PlanOptions options;
  options.chunk_tokens = 128;
  const bool masked = shape.hidden_end > 0;
  if (masked) {
    problem.mask = MaskKind::additive;
    problem.mask_dtype = DType::f16;
    options.policy.step_tokens = kMaskedStep;
  }
  const Plan plan = make_plan(problem, device, options);
  SCOPED_TRACE(std::string(plan.kernel_id()) + " group " + std::to_string(shape.group) + " q_len " +
               std::to_string(shape.q_len) + " window " + std::to_string(shape.window) + " from " +
               std::to_string(shape.kv_start) + " hidden " + std::to_string(shape.hidden_begin) + ".." +
               std::to_string(shape.hidden_end));
  ASSERT_NE(plan.kernel_id().find("attend_" + device.target + "_"), std::string_view::npos);
  EXPECT_EQ(plan.read_factor(), shape.expected_read_factor);

  std::vector<Watched> tensors = {{"K", format_bytes(format, shape.head_dim)},
                                  {"V", format_bytes(format, shape.head_dim)}};
  const std::int64_t groups = is_mlx(format) ? shape.head_dim / kQuantGroup : 0;
  for (const char* name : {"K's scales", "K's biases", "V's scales", "V's biases"}) {
    if (groups > 0) tensors.emplace_back(name, 2 * groups);
  }
  std::vector<float> q(static_cast<std::size_t>(problem.num_q_heads * shape.q_len * shape.head_dim), 0.0F);
  std::vector<float> out(q.size(), std::numeric_limits<float>::quiet_NaN());
  std::vector<std::uint8_t> workspace(plan.workspace_bytes());

  Inputs inputs;
  const std::int64_t q_head = shape.q_len * shape.head_dim;
  const std::int64_t kv_row = shape.head_dim / unit_values(format);
  const std::int64_t kv_head = kCapacity * kv_row;
  inputs.q = {q.data(), problem.num_q_heads * q_head, q_head, shape.head_dim};
  inputs.k = {tensors[0].bytes.data(), 2 * kv_head, kv_head, kv_row};
  inputs.v = {tensors[1].bytes.data(), 2 * kv_head, kv_head, kv_row};
  TensorView* sides[] = {&inputs.k_scales, &inputs.k_biases, &inputs.v_scales, &inputs.v_biases};
  for (std::size_t i = 2; i < tensors.size(); ++i) {
    *sides[i - 2] = {tensors[i].bytes.data(), 2 * kCapacity * groups, kCapacity * groups, groups};
  }
  const std::int32_t kv_lens[] = {static_cast<std::int32_t>(kValid)};
  inputs.kv_lens = kv_lens;
  const std::int32_t kv_starts[] = {static_cast<std::int32_t>(shape.kv_start)};
  inputs.kv_starts = kv_starts;
  std::vector<std::uint16_t> mask(kCapacity, 0);
  std::fill(mask.begin() + shape.hidden_begin, mask.begin() + shape.hidden_end, 0xfc00);  // -inf
  if (masked) inputs.mask = mask.data();
  Outputs outputs;
  outputs.out = out.data();
  outputs.out_seq_stride = problem.num_q_heads * q_head;
  outputs.out_head_stride = q_head;
  outputs.out_token_stride = shape.head_dim;
  Context context;
  context.num_threads = 1;

  const bool partly_seen = shape.window > 0 || shape.kv_start > 0 || masked;
  // Steps begin at the first key seen, not where the counter's do: bytes then count once, however often they are fetched.
  const auto step = static_cast<std::size_t>(partly_seen ? kCapacity : plan.policy().step_tokens);
  for (std::int64_t head = 0; head < 2; ++head) {
    std::vector<std::unique_ptr<test::LoadCounter>> counters;
    counters.reserve(tensors.size());
    for (const Watched& tensor : tensors) {
      counters.push_back(std::make_unique<test::LoadCounter>(tensor.bytes.data() + head * tensor.head_bytes(),
                                                             static_cast<std::size_t>(tensor.head_bytes()),
                                                             static_cast<std::size_t>(tensor.row_bytes), step));
    }
    attend(plan, inputs, outputs, workspace.data(), workspace.size(), context);
    const std::int64_t oldest =
        shape.window > 0 ? kValid - shape.q_len - shape.window + 1 : 0;  // the oldest row's first key
    const std::int64_t first_seen = std::max(shape.kv_start, oldest);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto row_bytes = static_cast<std::size_t>(tensors[i].row_bytes);
      const auto first_piece = static_cast<std::size_t>(first_seen) * row_bytes / test::LoadCounter::kPieceBytes;
      const auto end_piece = static_cast<std::size_t>(kValid) * row_bytes / test::LoadCounter::kPieceBytes;
      const auto pieces_of_a_row = row_bytes / test::LoadCounter::kPieceBytes;
      const std::vector<int>& fetches = counters[i]->fetches();
      for (std::size_t piece = 0; piece < fetches.size(); ++piece) {
        const auto token = static_cast<std::int64_t>(piece / pieces_of_a_row);
        const bool hidden = token >= shape.hidden_begin && token < shape.hidden_end;
        const bool seen = piece >= first_piece && piece < end_piece && !hidden;
        const std::int64_t expected = seen ? plan.read_factor() : 0;
        ASSERT_EQ(fetches[piece], expected)
            << tensors[i].name << " head " << head << " byte " << piece * 2 << " of token " << piece * 2 / row_bytes;
      }
    }
  }
  for (const float value : out) ASSERT_EQ(value, 0.0F);
}

class ReadFactorTest : public testing::TestWithParam<std::string> {
 protected:
  static void expect_read_factors(std::span<const Shape> shapes) {
    Device device;
    for (const Device& candidate : devices()) {
      if (candidate.backend == Backend::cpu && candidate.target == GetParam()) device = candidate;
    }
    ASSERT_EQ(device.target, GetParam());
    if (!device.unavailable.empty()) GTEST_SKIP() << "not run here: " << device.unavailable;
    for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8_0, KvFormat::q4_0,
                                  KvFormat::mlx_int8, KvFormat::mlx_int4}) {
      const std::int64_t values = is_mlx(format) ? kQuantGroup : unit_values(format);
      for (const Shape& shape : shapes) {
        if (shape.head_dim % values == 0) expect_read_factor(device, format, shape);
      }
    }
  }
};

TEST_P(ReadFactorTest, EveryValidByteIsFetchedAsOftenAsThePlanSays) { expect_read_factors(kShapes); }

TEST_P(ReadFactorTest, AWindowAndLeftPaddingLeaveEveryOtherByteUnread) { expect_read_factors(kPartlySeen); }

TEST_P(ReadFactorTest, StepsThatAMaskHidesStayUnread) { expect_read_factors(kMasked); }

INSTANTIATE_TEST_SUITE_P(Targets, ReadFactorTest,
                         testing::Values("portable", "avx2", "avx512", "avx512_bf16", "neon", "neon_bf16"),
                         [](const testing::TestParamInfo<std::string>& name) { return name.param; });

}  // namespace
}  // namespace kvonce
