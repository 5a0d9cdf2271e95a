// The baselines by themselves: every attention arm against the oracle, the loops against each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/reference.hpp"
#include "kvonce/bench_arms.hpp"  // brings the baselines
#include "kvonce/bench_buffer.hpp"
#include "kvonce/bench_cases.hpp"
#include "kvonce/bench_rows.hpp"
#include "kvonce/bench_timing.hpp"
#include "kvonce/kvonce.hpp"
#include "kvonce/report.hpp"
#include "shared/numeric.h"

namespace kvonce::tool {
namespace {

// Targets this machine can execute; the others are named in the test's output.
std::vector<std::string> usable_targets() {
  std::vector<std::string> names;
  for (const Device& device : devices()) {
    if (device.backend != Backend::cpu) continue;
    if (device.unavailable.empty()) names.push_back(device.target);
    if (!device.unavailable.empty()) ::testing::Test::RecordProperty(device.target + " not run", device.unavailable);
  }
  return names;
}

Problem small_problem(std::int64_t q_heads, std::int64_t kv_heads, std::int64_t dim_qk, std::int64_t dim_v,
                      std::int64_t kv_len, std::int64_t q_len, KvFormat format) {
  Problem problem;
  problem.num_seqs = 2;
  problem.q_len = q_len;
  problem.num_q_heads = q_heads;
  problem.num_kv_heads = kv_heads;
  problem.head_dim_qk = dim_qk;
  problem.head_dim_v = dim_v;
  problem.max_kv_len = kv_len;
  problem.k_format = problem.v_format = format;
  problem.q_dtype = static_cast<DType>(format);
  problem.scale = 1.0F / std::sqrt(static_cast<float>(dim_qk));
  return problem;
}

double per_head_error(const std::string& target, const Problem& problem, int num_threads, std::int64_t& num_blocks) {
  BenchBuffer buffer;
  CaseData data = lay_out_case(problem, 0);
  buffer.prepare(data.set_bytes, problem.k_format, bench::Team{1});
  place_case(data, buffer);
  bench::PerHead per_head(bench::target_kernels(target), problem, bench::Team{num_threads});
  num_blocks = per_head.num_blocks();
  const core::ReferenceResult wanted = core::reference_attend(problem, data.inputs(0));
  std::vector<float> out(wanted.out.size(), NAN);
  per_head.run(data.inputs(0), out.data());
  double difference = 0.0;
  double total = 0.0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    difference += (out[i] - wanted.out[i]) * (out[i] - wanted.out[i]);
    total += wanted.out[i] * wanted.out[i];
  }
  return total > 0.0 ? std::sqrt(difference / total) : difference;
}

TEST(BenchPerHeadTest, AgreesWithTheOracleOnEveryTarget) {
  struct Shape {
    std::int64_t q_heads, kv_heads, dim_qk, dim_v, kv_len, q_len;
  };
  const Shape shapes[] = {{4, 1, 128, 128, 200, 1}, {2, 2, 64, 64, 33, 2}, {3, 1, 80, 80, 129, 3},
                          {2, 1, 192, 128, 70, 1},  {2, 2, 37, 5, 65, 1},  {2, 1, 96, 112, 31, 4},
                          {1, 1, 576, 512, 50, 1},  {2, 1, 64, 64, 1, 1},  {2, 1, 64, 64, 2, 5}};
  for (const std::string& target : usable_targets()) {
    for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
      for (const Shape& shape : shapes) {
        const Problem problem =
            small_problem(shape.q_heads, shape.kv_heads, shape.dim_qk, shape.dim_v, shape.kv_len, shape.q_len, format);
        std::int64_t num_blocks = 0;
        EXPECT_LT(per_head_error(target, problem, 1, num_blocks), 2e-6)
            << target << " " << to_string(format) << " d" << shape.dim_qk << "x" << shape.dim_v << " kv "
            << shape.kv_len << " q " << shape.q_len;
      }
    }
  }
}

TEST(BenchPerHeadTest, SecondPassJoinsBlocksOfStridedSteps) {
  for (const std::string& target : usable_targets()) {
    Problem problem = small_problem(2, 1, 64, 64, 1000, 2, KvFormat::f16);
    std::int64_t num_blocks = 0;
    EXPECT_LT(per_head_error(target, problem, 7, num_blocks), 2e-6) << target;
    EXPECT_GT(num_blocks, 1);
    problem.causal = false;
    EXPECT_LT(per_head_error(target, problem, 7, num_blocks), 2e-6) << target;
  }
}

TEST(BenchPerHeadTest, RefusesWhatItCannotServe) {
  const bench::TargetKernels& kernels = bench::target_kernels("portable");
  Problem problem = small_problem(2, 1, 64, 64, 64, 1, KvFormat::f16);
  problem.window = 16;
  EXPECT_THROW(bench::PerHead(kernels, problem, bench::Team{1}), Error);
  problem.window = 0;
  problem.v_format = KvFormat::f32;
  EXPECT_THROW(bench::PerHead(kernels, problem, bench::Team{1}), Error);
}

TEST(BenchReadTest, EveryLoopReadsEveryByteOnce) {
  constexpr std::int64_t kBytes = 3 * 1024 * 1024 + 64 * 5;
  BenchBuffer buffer;
  buffer.prepare(kBytes, KvFormat::f16, bench::Team{1});
  std::uint64_t wanted = 0;
  for (std::int64_t at = 0; at < kBytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, buffer.data() + at, sizeof word);
    wanted ^= word;
  }
  for (const std::string& target : usable_targets()) {
    for (const bench::ReadLoop& loop : bench::target_kernels(target).read_loops) {
      for (const int threads : {1, 3}) {
        EXPECT_EQ(bench::run_read(loop, buffer.data(), kBytes, bench::Team{threads}), wanted)
            << target << " " << loop.name;
      }
      for (const std::size_t bytes : {std::size_t{64}, std::size_t{64 * 7}, std::size_t{4096 * 9 + 64}}) {
        std::uint64_t sum = 0;
        for (std::size_t at = 0; at < bytes; at += 8) {
          std::uint64_t word = 0;
          std::memcpy(&word, buffer.data() + at, sizeof word);
          sum ^= word;
        }
        EXPECT_EQ(loop.run(buffer.data(), bytes), sum) << target << " " << loop.name << " " << bytes;
      }
    }
  }
}

TEST(BenchQmvTest, AgreesWithDoubleInEveryRow) {
  constexpr std::int64_t kBytes = bench::Qmv::kCols * 2 * 37 + 64 * 2 * 3;  // 37 rows and a short one
  BenchBuffer buffer;
  buffer.prepare(kBytes, KvFormat::f16, bench::Team{1});
  const auto* const matrix = reinterpret_cast<const std::uint16_t*>(buffer.data());
  for (const std::string& target : usable_targets()) {
    bench::Qmv qmv(bench::target_kernels(target), kBytes, bench::Team{3});
    ASSERT_EQ(qmv.num_rows(), 38);
    EXPECT_EQ(qmv.cols(37), 64 * 3);
    qmv.run(matrix);
    for (std::int64_t row = 0; row < qmv.num_rows(); ++row) {
      double wanted = 0.0;
      for (std::int64_t col = 0; col < qmv.cols(row); ++col) {
        wanted += static_cast<double>(shared::f16_to_f32(matrix[row * bench::Qmv::kCols + col])) *
                  static_cast<double>(qmv.x()[static_cast<std::size_t>(col)]);
      }
      EXPECT_NEAR(qmv.y()[static_cast<std::size_t>(row)], wanted, 1e-2) << target << " row " << row;
    }
  }
}

TEST(BenchRatesTest, LoopsCountWhatTheyCompute) {
  for (const std::string& target : usable_targets()) {
    const bench::TargetKernels& kernels = bench::target_kernels(target);
    // sum = 0.999 sum + 0.001 from 0, 0.001, 0.002, ... in every lane: the fixed point is 1.
    const auto lanes = static_cast<float>(kernels.madd.madds_per_iteration);
    EXPECT_NEAR(kernels.madd.run(20000), lanes, 1e-2F * lanes) << target;
    EXPECT_LT(kernels.madd.run(10), 0.1F * lanes) << target;
    std::vector<float> in(256);
    std::vector<float> out(256, NAN);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = -static_cast<float>(i) / 16.0F;
    kernels.exp2(in.data(), out.data(), 256);
    for (std::size_t i = 0; i < in.size(); ++i)
      EXPECT_NEAR(out[i], std::exp2(in[i]), 1e-6F * std::exp2(in[i])) << target;
  }
}

TEST(BenchBufferTest, ValuesAreRandomSignedAndOfMagnitudeHalfToTwo) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
    std::vector<std::uint16_t> words(4096);
    const std::int64_t bytes = static_cast<std::int64_t>(words.size()) * 2;
    fill_random(words.data(), bytes, format, 7);
    std::set<double> distinct;
    double sum = 0.0;
    const std::int64_t count = bytes / format_bytes(format, 1);
    for (std::int64_t i = 0; i < count; ++i) {
      const double value = core::decode_value(format, words.data(), i);
      EXPECT_GE(std::fabs(value), 0.5);
      EXPECT_LT(std::fabs(value), 2.0);
      distinct.insert(value);
      sum += value;
    }
    EXPECT_GT(distinct.size(), 200U) << to_string(format);
    EXPECT_LT(std::fabs(sum / static_cast<double>(count)), 0.1) << to_string(format);
    for (const std::uint16_t word : words) EXPECT_LE(std::fabs(shared::f16_to_f32(word)), 65504.0F);
  }
}

TEST(BenchBufferTest, RefusesMoreMemoryThanTheMachineHas) {
  BenchBuffer buffer;
  EXPECT_THROW(buffer.prepare(std::int64_t{1} << 50, KvFormat::f16, bench::Team{1}), Error);
  EXPECT_THROW(buffer.prepare(4096, KvFormat::f8_e4m3, bench::Team{1}), Error);
}

TEST(BenchArmsTest, AWrongResultExceedsTheAllowedError) {
  const Problem problem = small_problem(4, 2, 64, 64, 300, 1, KvFormat::f16);
  BenchBuffer buffer;
  CaseData data = lay_out_case(problem, 0);
  buffer.prepare(data.set_bytes, problem.k_format, bench::Team{1});
  place_case(data, buffer);
  const Device device = cpu_device("portable", 1);
  const bench::TargetKernels& kernels = bench::target_kernels("portable");
  for (const char* const name : {"kvonce", "per_head"}) {
    const Arm arm = make_arm(name, data, device, {}, kernels, kernels.read_loops[0]);
    arm.run(0);
    EXPECT_LE(arm.error().value_or(1.0), arm.max_error) << name;
    // One value of V read wrongly, in a head that the oracle samples.
    CaseData wrong = data;
    wrong.oracle_rows[0].out[3] *= 1.01;
    const Arm checked = make_arm(name, wrong, device, {}, kernels, kernels.read_loops[0]);
    checked.run(0);
    EXPECT_GT(checked.error().value_or(0.0), checked.max_error) << name;
    // An arm that never wrote its output.
    const Arm idle = make_arm(name, data, device, {}, kernels, kernels.read_loops[0]);
    EXPECT_FALSE(idle.error().value_or(0.0) <= idle.max_error) << name;
  }
}

TEST(BenchArmsTest, SidesOfMlxFormatsFollowTheirStrides) {
  for (const char* const text : {"4q/2kv d128 kv=100 seqs=2 dtype=mlx_int8", "4q/2kv d64 kv=100 seqs=2 dtype=mlx_int4",
                                 "4q/2kv d64 kv=100 seqs=2 v_dtype=mlx_int4"}) {
    for (const bool tokens_first : {false, true}) {
      CaseData data = lay_out_case(to_problem(parse_case(text), KvFormat::f16, DType::f32), 0);
      data.tokens_first = tokens_first;
      BenchBuffer buffer;
      buffer.prepare(data.set_bytes, data.problem.k_format, bench::Team{1});
      place_case(data, buffer);
      const bench::TargetKernels& kernels = bench::target_kernels("portable");
      const Arm arm = make_arm("kvonce", data, cpu_device("portable", 1), {}, kernels, kernels.read_loops[0]);
      arm.run(0);
      EXPECT_LE(arm.error().value_or(1.0), arm.max_error) << text << ' ' << tokens_first;
    }
  }
}

TEST(BenchArmsTest, TokensBeforeHeadsAreReadByTheirStrides) {
  BenchBuffer buffer;
  CaseData heads_first = lay_out_case(small_problem(4, 2, 64, 48, 300, 1, KvFormat::f16), 0);
  buffer.prepare(heads_first.set_bytes, KvFormat::f16, bench::Team{1});
  place_case(heads_first, buffer);
  CaseData tokens_first = heads_first;
  tokens_first.tokens_first = true;
  place_case(tokens_first, buffer);
  EXPECT_NE(heads_first.oracle_rows[0].out, tokens_first.oracle_rows[0].out);
  const bench::TargetKernels& kernels = bench::target_kernels("portable");
  for (const char* const name : {"kvonce", "per_head"}) {
    const Arm arm = make_arm(name, tokens_first, cpu_device("portable", 1), {}, kernels, kernels.read_loops[0]);
    arm.run(0);
    EXPECT_LE(arm.error().value_or(1.0), arm.max_error) << name;
  }
}

TEST(BenchArmsTest, SetsCoverTheRotationAndAreOddInNumber) {
  const Problem problem = small_problem(32, 4, 128, 128, 2048, 1, KvFormat::f16);
  const CaseData data = lay_out_case(problem, std::int64_t{512} << 20);
  EXPECT_GE(data.num_sets * data.set_bytes, std::int64_t{512} << 20);
  EXPECT_EQ(data.num_sets % 2, 1);
  EXPECT_GE(data.set_bytes, data.kv_bytes());
}

TEST(BenchReportTest, SvgEscapesTheProcessorsName) {
  BenchReport report;
  report.device.name = "a<b>&\"c\"\x01";
  BenchRow row;
  row.num_q_heads = row.num_kv_heads = 1;
  row.arm = "kvonce";
  row.gbps = 1.0;
  report.rows = {row};
  const std::string svg = render_svg(report);
  EXPECT_NE(svg.find("a&lt;b&gt;&amp;&quot;c&quot; "), std::string::npos);
  EXPECT_EQ(svg.find('\x01'), std::string::npos);
}

// A report as a CUDA run makes it, from made-up times.
BenchReport cuda_report() {
  BenchReport report;
  report.device.backend = Backend::cuda;
  report.device.name = "gpu";
  report.device.target = "sm_90";
  report.device.num_sms = 132;
  const CaseSpec spec = parse_case("32q/4kv d128 kv=2048 dtype=bf16");
  const CaseData data = lay_out_case(timed_problem(spec, KvFormat::bf16, Backend::cuda), 0);
  const std::pair<const char*, double> times[] = {{"kvonce", 4.5}, {"per_head", 20.0}, {"read", 2.5}, {"floor", 4.0}};
  for (const auto& [arm, us] : times) {
    report.rows.push_back(make_row(spec, data, Backend::cuda, {arm, arm, 1}, {us - 1.0, us, us + 2.0}));
  }
  finish_rows(report, 0, 0.0, "read_1x512x8");
  return report;
}

TEST(BenchReportTest, CudaRowsHaveTheReadAsTheirRoof) {
  const BenchReport report = cuda_report();
  const nlohmann::ordered_json json = to_json(report);
  EXPECT_EQ(json["device"]["cuda_target"], "sm_90");
  EXPECT_EQ(json["device"]["num_sms"], 132);
  EXPECT_EQ(json["device"]["read_loop"], "read_1x512x8");
  EXPECT_FALSE(json["device"].contains("cpu_target"));
  const auto& row = json["rows"][0];
  EXPECT_EQ(row["backend"], "cuda");
  EXPECT_EQ(row["kv_bytes"], 4 << 20);
  EXPECT_EQ(row["us_median"], 4.5);
  EXPECT_EQ(row["us_min"], 3.5);
  EXPECT_EQ(row["ratio_to_read"], 2.5 / 4.5);
  EXPECT_EQ(row["ratio_to_roof"], row["ratio_to_read"]);
  EXPECT_EQ(row["roof_us"], 2.5);
  EXPECT_TRUE(row["rel_rms_error"].is_null());
}

TEST(BenchReportTest, CudaTablesShowMicroseconds) {
  const BenchReport report = cuda_report();
  const std::string compact = render_compact(report);
  EXPECT_NE(compact.find("gpu | sm_90 | 132 SMs"), std::string::npos) << compact;
  EXPECT_NE(compact.find("    4.50    20.00     2.50     4.00"), std::string::npos) << compact;
  EXPECT_NE(compact.find("0.56     4.44x"), std::string::npos) << compact;
  EXPECT_NE(render(report, Format::md).find("| 4.50"), std::string::npos);
  const std::string svg = render_svg(report);
  EXPECT_NE(svg.find("gpu, sm_90, 132 SMs"), std::string::npos);
  EXPECT_NE(svg.find(">floor<"), std::string::npos);
  EXPECT_EQ(svg.find(">qmv<"), std::string::npos);  // not among the arms
}

TEST(BenchReportTest, ChainRowsHoldTheDifferenceOfEveryRound) {
  BenchReport report;
  report.device.backend = Backend::cuda;
  for (const char* const text : {"32q/4kv d128 kv=2048 dtype=bf16", "32q/4kv d128 kv=8192 dtype=bf16"}) {
    const CaseSpec spec = parse_case(text);
    const CaseData data = lay_out_case(timed_problem(spec, KvFormat::bf16, Backend::cuda), 0);
    // The rounds' differences are 4, 2 and 5; the difference of the medians would be 3.
    const ChainTimes times = {{9.0, 5.0, 8.0}, {5.0, 3.0, 3.0}, {8.0, 8.0, 9.0}};
    report.rows.push_back(make_chain_row(spec, data, {"kvonce", "id", 1}, "plain", times));
    report.rows.push_back(make_chain_row(spec, data, {"kvonce_early", "id", 1}, "late", times));
  }
  const nlohmann::ordered_json json = to_json(report);
  const auto& row = json["rows"][1];
  EXPECT_EQ(row["mode"], "chain");
  EXPECT_EQ(row["arm"], "kvonce_early");
  EXPECT_EQ(row["neighbours"], "late");
  EXPECT_EQ(row["us_median"], 4.0);
  EXPECT_EQ(row["us_min"], 2.0);
  EXPECT_EQ(row["chain_us_median"], 8.0);
  EXPECT_EQ(row["neighbours_us_median"], 3.0);
  EXPECT_EQ(row["isolated_us_median"], 8.0);
  EXPECT_EQ(row["ratio_to_isolated"], 0.5);
  const std::string md = render(report, Format::md);
  EXPECT_EQ(std::count(md.begin(), md.end(), '\n'), 4) << md;
  EXPECT_NE(md.find("| KV MB | isolated us | kvonce plain | kvonce_early late |"), std::string::npos) << md;
  EXPECT_NE(md.find("kv=2048 q=1 seqs=1 bf16 | 4.2   | 8.00        | 4.00 (0.50x) | 4.00 (0.50x)"), std::string::npos)
      << md;
  EXPECT_NE(render_compact(report).find(md), std::string::npos);
}

TEST(BenchReportTest, KeysThatOnlySomeRowsHaveAreColumnsToo) {
  BenchReport report = cuda_report();
  report.rows[1].planned_kv_len = 4096;
  const std::string csv = render(report, Format::csv);
  std::istringstream lines(csv);
  std::string header;
  std::string first;
  std::string second;
  std::getline(lines, header);
  std::getline(lines, first);
  std::getline(lines, second);
  EXPECT_TRUE(header.ends_with(",planned_kv_len")) << header;
  EXPECT_TRUE(first.ends_with(",")) << first;
  EXPECT_TRUE(second.ends_with(",4096")) << second;
}

TEST(BenchCasesTest, CudaCoversTheSeedsGeometriesUpTo131072Tokens) {
  const std::vector<CaseSpec> cases = choose_cases("", {}, Backend::cuda);
  EXPECT_EQ(cases.size(), 20U);
  for (const CaseSpec& seed : choose_cases("", {})) {
    EXPECT_NE(std::find(cases.begin(), cases.end(), seed), cases.end()) << to_string(seed);
  }
  EXPECT_EQ(std::count_if(cases.begin(), cases.end(), [](const CaseSpec& c) { return c.kv_len == 131072; }), 5);
}

TEST(BenchArmsTest, ResultsAreStoredLikeTheQueryButF16OnTheCpu) {
  const CaseSpec spec = parse_case("32q/4kv d128 kv=64");
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
    const auto dtype = static_cast<DType>(format);
    EXPECT_EQ(timed_problem(spec, format, Backend::cuda).out_dtype, dtype);
    EXPECT_EQ(timed_problem(spec, format).out_dtype, dtype == DType::f16 ? DType::f32 : dtype);
  }
}

}  // namespace
}  // namespace kvonce::tool
