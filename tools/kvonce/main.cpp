// The kvonce command: parses, dispatches to one subcommand, and turns every failure into one line and an exit code.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "kvonce/commands.hpp"
#include "kvonce/types.hpp"

namespace kvonce::tool {
namespace {

constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kBadUsage = 2;
constexpr int kUnavailable = 3;

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::InvalidArgument:
      return kBadUsage;
    case ErrorCode::Unsupported:
    case ErrorCode::Unavailable:
      return kUnavailable;
    case ErrorCode::Internal:
      break;
  }
  return kFailed;
}

constexpr const char* kPolicyHelp =
    "Tunables: key=value,.. such as row_tile=4, or a policy FILE as `kvonce tune` writes it";

// CLI11 is instantiated in this file only: it takes longer to compile than the commands.

void add_target_options(CLI::App& command, DeviceOptions& options) {
  constexpr int kMaxThreads = 4096;
  command.add_option("--target", options.target, "Instruction-set target, see `kvonce devices` (default: the best)");
  command.add_option("--threads", options.num_threads, "Threads to use (default: all)")
      ->check(CLI::Range(1, kMaxThreads).description(""));
}

void add_device_options(CLI::App& command, DeviceOptions& options) {
  add_target_options(command, options);
  command.add_option("--policy", options.policy, kPolicyHelp);
}

void add_backend_option(CLI::App& command, DeviceOptions& options) {
  const auto choose = [&options](const std::string& name) {
    options.backend = name == "cuda" ? Backend::cuda : Backend::cpu;
  };
  command.add_option_function<std::string>("--backend", choose, "Where to run: cpu or cuda (default cpu)")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""));
}

// Plans need no device, so that those for an Apple GPU can be explained anywhere.
void add_planned_backend_option(CLI::App& command, DeviceOptions& options) {
  const auto choose = [&options](const std::string& name) {
    for (const Backend backend : {Backend::cpu, Backend::cuda, Backend::metal}) {
      if (to_string(backend) == name) options.backend = backend;
    }
  };
  command
      .add_option_function<std::string>("--backend", choose,
                                        "What to plan for: cpu, cuda or metal, an Apple GPU that --target and --cores "
                                        "describe (default cpu)")
      ->check(CLI::IsMember({"cpu", "cuda", "metal"}).description(""));
  constexpr int kMostCores = 1024;
  command.add_option("--cores", options.num_cores, "Metal: GPU cores (default: unknown)")
      ->check(CLI::Range(1, kMostCores).description(""));
}

void add_case_options(CLI::App& command, std::string& cases_path, std::vector<std::string>& case_texts) {
  command.add_option("--cases", cases_path, "FILE with one case string per line, # starts a comment");
  command.add_option("--case", case_texts, "A case string; may be given several times")->expected(1)->take_all();
}

void add_format_option(CLI::App& command, std::optional<Format>& format) {
  const auto choose = [&format](const std::string& name) {
    if (name == "md") format = Format::md;
    if (name == "csv") format = Format::csv;
    if (name == "json") format = Format::json;
  };
  command.add_option_function<std::string>("--format", choose, "How to print the table: md, csv or json")
      ->check(CLI::IsMember({"md", "csv", "json"}).description(""));
}

#ifdef KVONCE_HAS_BENCH
void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Time decode attention beside the per-head form and a pure read");
  command->footer(
      "Examples:\n  kvonce bench\n  kvonce bench --dtype bf16 --svg bench.svg --out bench.json\n"
      "  kvonce bench --case \"32q/4kv d128 kv=32768 q=1 seqs=1\" --arms kvonce,read --rounds 31\n"
      "  kvonce bench --backend cuda\n  kvonce bench --backend cuda --chain\n\n"
      "Without --case and --cases: four geometries at 2K, 8K and 32K tokens. The arms are kvonce, per_head (one "
      "worker\n"
      "per query head), read (pure streaming, the ceiling) and qmv (dense f16 matrix-vector product over as many "
      "bytes).\n"
      "With --backend cuda: five geometries at 2K to 128K tokens, and a fifth arm, floor (streams the same bytes and\n"
      "joins partials like kvonce, without arithmetic). --chain: what attention adds between a kernel that writes q "
      "and\n"
      "the newest K and V and one that reads the result; its arms are kvonce and kvonce_early (earlier_kv_ready).");
  command->add_option("--dtype", options->dtype,
                      "How K and V are stored when a case has no dtype= (default f16; bf16 with --backend cuda)");
  add_case_options(*command, options->cases_path, options->case_texts);
  command
      ->add_option("--arms", options->arms,
                   "Some of kvonce,per_head,read,qmv,floor; with --chain of kvonce,kvonce_early (default: all)")
      ->delimiter(',');
  constexpr std::int64_t kMostRounds = 1000000;
  command
      ->add_option("--rounds", options->rounds,
                   "Timed rounds per case (default: what fits two seconds; half a second on CUDA)")
      ->check(CLI::Range(std::int64_t{1}, kMostRounds).description(""));
  command->add_flag("--chain", options->chain, "CUDA: marginal cost in a chain of kernels instead of isolated calls");
  constexpr std::int64_t kMostTokens = 2147483647;
  command
      ->add_option("--planned-kv-len", options->planned_kv_len,
                   "CUDA: adds arms with the lengths in device memory, planned for each case (kvonce_lens) and for so "
                   "many tokens (kvonce_planned)")
      ->check(CLI::Range(std::int64_t{1}, kMostTokens).description(""));
  command->add_option("--out", options->out_path, "FILE for the results as JSON, schema kvonce.bench/1");
  command->add_option("--svg", options->svg_path, "FILE for a bar chart per geometry");
  add_format_option(*command, options->format);
  add_backend_option(*command, options->device);
  add_device_options(*command, options->device);
  command->callback([options, &exit_code] { exit_code = run_bench(*options); });
}

void add_tune_command(CLI::App& app, int& exit_code, const std::string& typed) {
  auto options = std::make_shared<TuneOptions>();
  options->command = typed;
  options->dtypes = {"f32", "f16", "bf16"};
  CLI::App* command = app.add_subcommand("tune", "Measure the tunables on this machine and write a policy file");
  command->footer(
      "Examples:\n  kvonce tune --out machine.policy\n  KVONCE_POLICY=machine.policy ./my_program\n"
      "  kvonce tune --case \"32q/4kv d128 kv=32768\" --dtype bf16 --seconds 20 --out machine.policy\n\n"
      "Without --case and --cases: four geometries at 2K, 8K and 32K tokens, about a minute. What does not win 3 %\n"
      "twice stays as it is built in. --policy of the other commands and KVONCE_POLICY take the file.");
  command->add_option("--dtype", options->dtypes, "Some of f32,f16,bf16, for cases without dtype= (default: all)")
      ->delimiter(',');
  add_case_options(*command, options->cases_path, options->case_texts);
  CLI::Option* quick = command->add_flag("--quick", options->quick, "About 6 seconds: rougher");
  constexpr double kLongest = 86400.0;
  command->add_option("--seconds", options->seconds, "Seconds of timing for all cases together (default 60)")
      ->check(CLI::Range(0.1, kLongest).description(""))
      ->excludes(quick);
  command->add_option("--out", options->out_path, "The policy FILE to write");
  add_format_option(*command, options->format);
  add_target_options(*command, options->device);
  command->callback([options, &exit_code] { exit_code = run_tune(*options); });
}
#endif

void add_check_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand("check", "Check every kernel of this machine against the oracle");
  command->footer(
      "Example:\n  kvonce check --quick\n\n"
      "Without options every CPU target and CUDA device that this machine has is checked. The last line is the sum:\n"
      "N passed, N failed, N skipped. Exit code 1 when a case failed. Environment: KVONCE_ONLY=TEXT runs the cases "
      "whose\n"
      "names contain TEXT, KVONCE_TRACE=1 names each CUDA case before it runs.");
  CLI::Option* quick = command->add_flag("--quick", options->quick, "Fewer cases, in under 20 seconds");
  command->add_flag("--full", options->full, "Every case: minutes per target")->excludes(quick);
  CLI::Option* target = command->add_option("--target", options->target, "This CPU target only, see `kvonce devices`");
  command->add_option("--backend", options->backend, "This backend only: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->excludes(target);
  command->add_option("--policy", options->policy, "A policy FILE, as `kvonce tune` writes it");
  add_format_option(*command, options->format);
  command->callback([options, &exit_code] { exit_code = run_check(*options); });
}

void add_run_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Attend over the q, k and v of a safetensors file");
  command->footer(
      "Example:\n  kvonce run --input layer.safetensors --out attended.safetensors --lse --check\n\n"
      "The input holds q [num_seqs, num_q_heads, q_len, head_dim_qk], k [num_seqs, num_kv_heads, kv_len, "
      "head_dim_qk],\n"
      "v [num_seqs, num_kv_heads, kv_len, head_dim_v]; F32, F16 or BF16, k and v alike. Optional are kv_lens I32 "
      "[num_seqs],\n"
      "sinks and alibi_slopes F32 [num_q_heads], and mask [num_seqs, num_q_heads, q_len, kv_len], each of the first "
      "three\n"
      "axes may be 1: F32, F16 or BF16 are added to the scores, -inf hides; BOOL or U8 hide where 0. The output holds "
      "out [num_seqs, num_q_heads, q_len, head_dim_v] with the dtype of q, and with --lse "
      "also\n"
      "lse F32 [num_seqs, num_q_heads, q_len].\n"
      "--check allows a relative RMS error of 2e-6 (all f32), 1e-5 (f16 or bf16 k and v), 2^-11 (f16 out) or 2^-8 "
      "(bf16\n"
      "out), and 1e-5 in lse.");
  command->add_option("--input", options->input, "The safetensors file to read")->required();
  command->add_option("--out", options->out, "The safetensors file to write; may be left out with --check");
  command->add_flag("--causal,!--no-causal", options->causal,
                    "Whether a row sees only keys up to its own position, bottom-right aligned (default: causal)");
  command->add_option("--scale", options->scale, "Factor of q.k (default head_dim_qk^-0.5)");
  command->add_option("--softcap", options->softcap, "c: scores become c tanh(score / c); 0: as they are (default 0)");
  command->add_flag("--lse", options->lse, "Also write the natural logarithm of each row's sum of exponentials");
  command->add_flag("--check", options->check, "Compare with the double-precision oracle; exit 1 beyond the tolerance");
  add_device_options(*command, options->device);
  add_format_option(*command, options->format);
  command->callback([options, &exit_code] { exit_code = run_file(*options); });
}

void add_explain_command(CLI::App& app) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command = app.add_subcommand("explain", "Print what would run for a case, and why");
  command->footer(
      "Examples:\n  kvonce explain \"32q/4kv d128 kv=32768 q=1 seqs=1 dtype=bf16\" --target avx2 --threads 2\n"
      "  kvonce explain \"32q/4kv d128 kv=32768\" --backend metal --target apple10 --cores 20\n\n"
      "A case is: 32q/4kv d128 kv=32768 [q=1] [seqs=1] [dtype=bf16] [causal=1] [layout=nhd] [v_dtype=q8_0] "
      "[mask=additive] "
      "[softcap=30] [alibi=1] [sinks=1]; d192x128 when K and V "
      "differ.");
  command->add_option("case,--case", options->case_text, "The case string")->required();
  command->add_option("--dtype", options->dtype, "How K and V are stored when the case has no dtype= (default f16)");
  command->add_option("--q-dtype", options->q_dtype, "Type of q and out: f32, f16 or bf16 (default: as K and V)");
  add_planned_backend_option(*command, options->device);
  add_device_options(*command, options->device);
  command->callback([options] { run_explain(*options); });
}

void add_devices_command(CLI::App& app) {
  auto format = std::make_shared<std::optional<Format>>();
  CLI::App* command = app.add_subcommand("devices", "List backends and targets, and why the missing ones are missing");
  command->footer("Example:\n  kvonce devices --format json");
  add_format_option(*command, *format);
  command->callback([format] { run_devices(format->value_or(Format::md)); });
}

// "kvonce run: message" on one line, whatever the message holds.
int report(const CLI::App& app, std::string message, int exit_code) {
  for (char& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  std::string command = "kvonce";
  for (const CLI::App* used : app.get_subcommands()) command += " " + used->get_name();
  fmt::print(stderr, "{}: {}\n", command, message);
  return exit_code;
}

// CLI11 answers a missing and a misspelt subcommand alike; this says which names there are.
void require_known_subcommand(const CLI::App& app, int argc, const char* const* argv) {
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (argc > 1 && command->get_name() == argv[1]) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  if (argc > 1 && argv[1][0] == '-') return;
  const std::string given = argc > 1 ? fmt::format("'{}'", argv[1]) : "nothing";
  throw Error(ErrorCode::InvalidArgument, fmt::format("subcommand: must be one of {}, got {}", names, given));
}

// As it was typed, on one line, words with blanks in quotes.
std::string command_line(int argc, const char* const* argv) {
  std::string text = "kvonce";
  for (int i = 1; i < argc; ++i) {
    std::string word(argv[i]);
    std::replace_if(
        word.begin(), word.end(), [](char c) { return c >= '\0' && c < ' '; }, '?');
    text += word.find(' ') == std::string::npos ? " " + word : " \"" + word + "\"";
  }
  return text;
}

int run(int argc, char** argv) {
  CLI::App app("Decode attention that streams each byte of the KV cache once", "kvonce");
  app.footer(
      "Examples:\n  kvonce bench\n  kvonce tune --out machine.policy\n  kvonce check --quick\n"
      "  kvonce run --input layer.safetensors --out attended.safetensors --check\n"
      "  kvonce explain \"32q/4kv d128 kv=32768\"\n  kvonce devices\n\n"
      "Exit codes: 0 ok, 1 a check failed, 2 bad usage or input, 3 unavailable or unsupported here.");
  app.set_version_flag("--version", "kvonce " + std::string(version()));
  app.require_subcommand(1);

  int exit_code = kOk;
#ifdef KVONCE_HAS_BENCH
  add_bench_command(app, exit_code);
  add_tune_command(app, exit_code, command_line(argc, argv));
#endif
  add_check_command(app, exit_code);
  add_run_command(app, exit_code);
  add_explain_command(app);
  add_devices_command(app);
  try {
    require_known_subcommand(app, argc, argv);
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    return report(app, error.what(), kBadUsage);
  } catch (const Error& error) {
    return report(app, error.what(), exit_code_of(error.code()));
  } catch (const std::bad_alloc&) {
    return report(app, "not enough memory for this input", kUnavailable);
  } catch (const std::exception& error) {
    return report(app, error.what(), kFailed);
  }
  return exit_code;
}

}  // namespace
}  // namespace kvonce::tool

int main(int argc, char** argv) {
  try {
    return kvonce::tool::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvonce: %s\n", error.what());
    return 1;
  }
}
