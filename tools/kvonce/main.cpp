// The kvonce command: parses, dispatches to one subcommand, and turns every failure into one line and an exit code.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "kvonce/commands.hpp"
#include "kvonce/types.hpp"
#ifdef KVONCE_HAS_BENCH
#include "kvonce/bench.hpp"
#endif

namespace {

constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kBadUsage = 2;
constexpr int kUnavailable = 3;

int exit_code_of(kvonce::ErrorCode code) {
  switch (code) {
    case kvonce::ErrorCode::InvalidArgument:
      return kBadUsage;
    case kvonce::ErrorCode::Unsupported:
    case kvonce::ErrorCode::Unavailable:
      return kUnavailable;
    case kvonce::ErrorCode::Internal:
      break;
  }
  return kFailed;
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
  throw kvonce::Error(kvonce::ErrorCode::InvalidArgument,
                      fmt::format("subcommand: must be one of {}, got {}", names, given));
}

int run(int argc, char** argv) {
  CLI::App app("Decode attention that streams each byte of the KV cache once", "kvonce");
  app.footer(
      "Examples:\n  kvonce bench\n  kvonce check --quick\n"
      "  kvonce run --input layer.safetensors --out attended.safetensors --check\n"
      "  kvonce explain \"32q/4kv d128 kv=32768\"\n  kvonce devices\n\n"
      "Exit codes: 0 ok, 1 a check failed, 2 bad usage or input, 3 unavailable or unsupported here.");
  app.set_version_flag("--version", "kvonce " + std::string(kvonce::version()));
  app.require_subcommand(1);

  int exit_code = kOk;
#ifdef KVONCE_HAS_BENCH
  kvonce::tool::add_bench_command(app, exit_code);
#endif
  kvonce::tool::add_check_command(app, exit_code);
  kvonce::tool::add_run_command(app, exit_code);
  kvonce::tool::add_explain_command(app, exit_code);
  kvonce::tool::add_devices_command(app, exit_code);
  try {
    require_known_subcommand(app, argc, argv);
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    return report(app, error.what(), kBadUsage);
  } catch (const kvonce::Error& error) {
    return report(app, error.what(), exit_code_of(error.code()));
  } catch (const std::bad_alloc&) {
    return report(app, "not enough memory for this input", kUnavailable);
  } catch (const std::exception& error) {
    return report(app, error.what(), kFailed);
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvonce: %s\n", error.what());
    return kFailed;
  }
}
