#include "kvonce/policy_file.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvonce/kvonce.h"

namespace kvonce {
namespace {

Problem decode_problem(std::int64_t group = 8, KvFormat format = KvFormat::bf16) {
  Problem p;
  p.num_q_heads = 4 * group;
  p.num_kv_heads = 4;
  p.head_dim_qk = 128;
  p.max_kv_len = 4096;
  p.k_format = p.v_format = format;
  return p;
}

Device device() { return cpu_device("portable", 2); }

PlanOptions with_file(const std::string& rules) {
  PlanOptions options;
  options.policy_file = std::make_shared<PolicyFile>(parse_policy_file("kvonce.policy/1\n" + rules, "rules"));
  return options;
}

Policy planned(const Problem& problem, const PlanOptions& options) {
  return make_plan(problem, device(), options).policy();
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
    return error.what();
  }
  return "nothing was refused";
}

void expect_parts(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

TEST(PolicyFileTest, RulesRoundTrip) {
  const std::vector<std::string> rules = {
      "target=portable q=bf16 k=bf16 v=f16 rows=5..8 dims=64: row_tile=2,step_tokens=64",
      "k=q8_0 rows=9.. dims=64..128: prefetch_tokens=0,worker_bytes=65536",
      "rows=1: pair_dot=0",
      "any: chunk_tokens=512",
  };
  std::string text = "# made by hand\n\nkvonce.policy/1 # the form\r\n";
  for (const std::string& rule : rules) text += "  " + rule + "   # why\r\n\n";
  const PolicyFile file = parse_policy_file(text, "rules");
  ASSERT_EQ(file.rules.size(), rules.size());
  for (std::size_t i = 0; i < rules.size(); ++i) {
    EXPECT_EQ(to_string(file.rules[i]), rules[i]);
    EXPECT_EQ(file.rules[i].line, 4 + 2 * static_cast<int>(i));
  }
  EXPECT_EQ(file.rules[0].policy.prefetch_tokens, -1) << "what is not named stays open";
  EXPECT_EQ(parse_policy_file("kvonce.policy/1", "rules").rules.size(), 0U);
}

TEST(PolicyFileTest, EveryConditionMustHold) {
  const PolicyRule rule =
      parse_policy_file("kvonce.policy/1\ntarget=portable q=f32 k=bf16 v=bf16 rows=5..8 dims=128: row_tile=2", "r")
          .rules[0];
  const Problem fits = decode_problem(8);
  EXPECT_TRUE(rule.matches(fits, device()));
  const auto differs = [&](const std::function<void(Problem&, Device&)>& change) {
    Problem problem = fits;
    Device other = device();
    change(problem, other);
    return !rule.matches(problem, other);
  };
  EXPECT_TRUE(differs([](Problem&, Device& d) { d.target = "avx2"; }));
  EXPECT_TRUE(differs([](Problem&, Device& d) { d.backend = Backend::cuda; }));
  EXPECT_TRUE(differs([](Problem& p, Device&) { p.q_dtype = DType::bf16; }));
  EXPECT_TRUE(differs([](Problem& p, Device&) { p.k_format = KvFormat::f16; }));
  EXPECT_TRUE(differs([](Problem& p, Device&) { p.v_format = KvFormat::f16; }));
  EXPECT_TRUE(differs([](Problem& p, Device&) { p.head_dim_qk = 64; }));
  EXPECT_TRUE(differs([](Problem& p, Device&) { p.head_dim_qk = 192; }));
  EXPECT_TRUE(differs([](Problem& p, Device&) { p.num_q_heads = 4 * 4; }));
  EXPECT_TRUE(differs([](Problem& p, Device&) { p.q_len = 2; })) << "16 rows";
  EXPECT_FALSE(differs([](Problem& p, Device&) { p.num_q_heads = 4 * 5; }));
  EXPECT_FALSE(differs([](Problem& p, Device& d) {
    p.num_seqs = 7;
    p.max_kv_len = 3;
    d.num_threads = 1;
  })) << "the batch, the cache length and the threads are no conditions";
}

TEST(PolicyFileTest, BadFilesAreRefusedByLine) {
  struct Case {
    const char* line;
    std::initializer_list<const char*> parts;
  };
  const Case cases[] = {
      {"row_tile=4", {"row_tile=4", "any: row_tile=4"}},
      {": row_tile=4", {"target=, q=, k=", "''"}},
      {"any:", {"any:", "after the colon"}},
      {"any: row_tiles=4", {"row_tiles", "rows_per_worker"}},
      {"any: row_tile=x", {"row_tile=x"}},
      {"any: row_tile=4,row_tile=2", {"row_tile twice"}},
      {"any: row_tile=4 step_tokens=64", {"row_tile=4 step_tokens=64"}},
      {"any rows=3: row_tile=2", {"'any'"}},
      {"kv_len=8: row_tile=2", {"kv_len=8", "rows="}},
      {"target=avx9000: row_tile=2", {"avx9000", "avx2"}},
      {"target=: row_tile=2", {"target="}},
      {"q=q8_0: row_tile=2", {"q=q8_0", "f32, f16, bf16"}},
      {"k=f17: row_tile=2", {"k=f17", "q8_0"}},
      {"v: row_tile=2", {"'v'"}},
      {"rows=0: row_tile=2", {"rows=0", "N..M"}},
      {"rows=8..5: row_tile=2", {"rows=8..5"}},
      {"rows=..5: row_tile=2", {"rows=..5"}},
      {"rows=5...8: row_tile=2", {"rows=5...8"}},
      {"rows=99999999999999999999: row_tile=2", {"rows=999"}},
      {"rows=1 rows=2: row_tile=2", {"rows=2", "once"}},
      {"dims=1025: row_tile=2", {"dims=1025", "1024"}},
      {"\x1b[31m: row_tile=2", {"'?[31m'"}},
  };
  for (const Case& c : cases) {
    const std::string text = "kvonce.policy/1\n# a comment\nany: row_tile=1\n" + std::string(c.line) + "\n";
    const std::string message = error_of([&] { parse_policy_file(text, "rules"); });
    expect_parts(message, {"rules:4: "});
    expect_parts(message, c.parts);
  }
  for (const char* text : {"", "# nothing\n", "any: row_tile=4\n", "kvonce.policy/2\n", "{}"}) {
    expect_parts(error_of([&] { parse_policy_file(text, "rules"); }), {"rules:", "kvonce.policy/1"});
  }
}

TEST(PolicyFileTest, FilesThatCannotBeReadAreRefusedByName) {
  for (const char* path : {"/no/such/file", "/", "/proc/self/mem"}) {
    expect_parts(error_of([&] { load_policy_file(path); }), {path, "cannot be read"});
  }
  expect_parts(error_of([] { load_policy_file("/dev/zero"); }), {"/dev/zero", "1 MiB"});
}

TEST(PolicyFileTest, TheFirstMatchingRuleWinsAndTheRestIsBuiltIn) {
  const Policy built_in = planned(decode_problem(), with_file(""));
  const PlanOptions options = with_file("k=f16: row_tile=1\nrows=5..8: row_tile=2\nany: row_tile=3,chunk_tokens=192\n");
  EXPECT_EQ(planned(decode_problem(8), options).row_tile, 2);
  EXPECT_EQ(planned(decode_problem(8), options).chunk_tokens, built_in.chunk_tokens) << "not of a later rule";
  EXPECT_EQ(planned(decode_problem(8, KvFormat::f16), options).row_tile, 1);
  EXPECT_EQ(planned(decode_problem(4), options).chunk_tokens, 192);
  EXPECT_EQ(to_string(planned(decode_problem(), with_file("k=f16: row_tile=1"))), to_string(built_in));
}

TEST(PolicyFileTest, TheCallersFieldsWinOverTheRules) {
  PlanOptions options = with_file("any: row_tile=2,chunk_tokens=192,prefetch_tokens=0\n");
  options.chunk_tokens = 320;
  options.policy.row_tile = 3;
  const Policy policy = planned(decode_problem(), options);
  EXPECT_EQ(policy.chunk_tokens, 320);
  EXPECT_EQ(policy.row_tile, 3);
  EXPECT_EQ(policy.prefetch_tokens, 0);

  options = with_file("any: row_tile=4\n");
  options.policy.rows_per_worker = 2;
  EXPECT_EQ(planned(decode_problem(), options).rows_per_worker, 2) << "a rule that does not fit gives way";
  options = with_file("any: rows_per_worker=2\n");
  options.policy.row_tile = 4;
  EXPECT_EQ(planned(decode_problem(), options).row_tile, 4);
}

TEST(PolicyFileTest, ARuleThatCannotRunIsRefusedWithItsLine) {
  const auto refused = [](const char* rule) {
    return error_of([&] { planned(decode_problem(), with_file(std::string("any: ") + rule)); });
  };
  expect_parts(refused("row_tile=9"), {"rules:2: policy.row_tile", "9"});
  expect_parts(refused("step_tokens=17"), {"rules:2: policy.step_tokens", "17"});
  expect_parts(refused("pair_dot=1"), {"rules:2: policy.pair_dot"});
  PlanOptions options = with_file("any: row_tile=2");
  options.policy.step_tokens = 17;
  EXPECT_EQ(error_of([&] { planned(decode_problem(), options); }).find("rules"), std::string::npos) << "the caller's";
}

TEST(PolicyFileTest, ExplainSaysWhereValuesComeFrom) {
  PlanOptions options = with_file("k=bf16: row_tile=2,step_tokens=64\n");
  options.policy.step_tokens = 32;
  const std::string text = make_plan(decode_problem(), device(), options).explain();
  expect_parts(text, {"policy from", "rules:2: row_tile;", "the caller: step_tokens;", "the rest is built in"});
  expect_parts(make_plan(decode_problem(8, KvFormat::f16), device(), options).explain(), {"no rule of rules applies"});
}

// The output of `body` in a child process whose KVONCE_POLICY names `path`: the variable is read once per process.
std::string in_child(const char* path, const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    setenv("KVONCE_POLICY", path, 1);
    const std::string text = body();
    const bool written = write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char part[512];
  for (ssize_t count = 0; (count = read(ends[0], part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(count));
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return text;
}

class PolicyEnvironmentTest : public testing::Test {
 protected:
  void SetUp() override { std::ofstream(path_) << "kvonce.policy/1\nk=bf16 rows=8: chunk_tokens=192\n"; }
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string path_ = testing::TempDir() + "kvonce_policy_test_" + std::to_string(getpid());
};

std::string planned_chunk(const PlanOptions& options = {}) {
  try {
    return std::to_string(planned(decode_problem(), options).chunk_tokens);
  } catch (const Error& error) {
    return error.what();
  }
}

// The parent never makes a plan without a policy file of its own: a child would inherit what that one read.
TEST_F(PolicyEnvironmentTest, EveryMakePlanFollowsTheFile) {
  EXPECT_EQ(in_child(path_.c_str(), [] { return planned_chunk(); }), "192");
  EXPECT_NE(in_child("", [] { return planned_chunk(); }), "192") << "empty: no file";
  PlanOptions options;
  options.chunk_tokens = 320;
  EXPECT_EQ(in_child(path_.c_str(), [&] { return planned_chunk(options); }), "320");
  EXPECT_EQ(in_child(path_.c_str(), [] { return planned_chunk(with_file("any: chunk_tokens=448")); }), "448");
  EXPECT_NE(in_child(path_.c_str(), [] { return planned_chunk(with_file("")); }), "192")
      << "no rules, by the caller's wish";
}

TEST_F(PolicyEnvironmentTest, ExplainNamesTheFileOnlyWhenThereIsOne) {
  const auto explained = [] { return make_plan(decode_problem(), device()).explain(); };
  expect_parts(in_child(path_.c_str(), explained), {"policy from", (path_ + ":2: chunk_tokens;").c_str()});
  const std::string without = in_child("", explained);
  EXPECT_EQ(without.find("policy from"), std::string::npos) << without;
  expect_parts(without, {"policy "});
}

TEST_F(PolicyEnvironmentTest, TheCAbiFollowsTheFile) {
  const auto chunks = [](const char* policy) {
    kvonce_problem problem;
    kvonce_problem_init(&problem, sizeof problem);
    problem.num_q_heads = 32;
    problem.num_kv_heads = 4;
    problem.head_dim_qk = 128;
    problem.max_kv_len = 1920;
    problem.k_format = problem.v_format = KVONCE_KV_BF16;
    kvonce_options options;
    kvonce_options_init(&options, sizeof options);
    options.policy = policy;
    kvonce_plan* plan = nullptr;
    if (kvonce_plan_create(&problem, "portable", 1, &options, &plan) != KVONCE_OK)
      return std::string(kvonce_last_error());
    std::int64_t count = 0;
    kvonce_plan_max_chunks(plan, &count);
    kvonce_plan_destroy(plan);
    return std::to_string(count);
  };
  EXPECT_EQ(in_child(path_.c_str(), [&] { return chunks(nullptr); }), "10");
  EXPECT_EQ(in_child(path_.c_str(), [&] { return chunks("chunk_tokens=640"); }), "3");
  expect_parts(in_child("/no/such/file", [&] { return chunks(nullptr); }), {"KVONCE_POLICY", "/no/such/file"});
}

TEST_F(PolicyEnvironmentTest, ABadFileIsRefusedEveryTime) {
  std::ofstream(path_) << "kvonce.policy/1\nsometimes: chunk_tokens=192\n";
  const std::string text = in_child(path_.c_str(), [&] {
    const std::string first = planned_chunk();
    std::ofstream(path_) << "kvonce.policy/1\n";  // read once: what it holds now does not matter
    return first + "\n" + (planned_chunk() == first ? "again" : "differs");
  });
  expect_parts(text, {"KVONCE_POLICY: ", ":2: ", "sometimes", "\nagain"});
}

TEST_F(PolicyEnvironmentTest, ThreadsMayAskFirstTogether) {
  const std::string text = in_child(path_.c_str(), [] {
    std::vector<std::string> got(8);
    std::vector<std::thread> threads;
    threads.reserve(got.size());
    for (std::string& one : got) threads.emplace_back([&one] { one = planned_chunk(); });
    for (std::thread& thread : threads) thread.join();
    std::string all;
    for (const std::string& one : got) all += one + " ";
    return all;
  });
  EXPECT_EQ(text, "192 192 192 192 192 192 192 192 ");
}

}  // namespace
}  // namespace kvonce
