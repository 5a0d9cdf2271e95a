// The subcommands. Each add_* defines its options on `app`; when the user chose it, parsing runs it, sets `exit_code`
// (0 ok, 1 a check failed) and throws Error for what main() reports.
#pragma once

namespace CLI {
class App;
}

namespace kvonce::tool {

void add_run_command(CLI::App& app, int& exit_code);
void add_check_command(CLI::App& app, int& exit_code);
void add_explain_command(CLI::App& app, int& exit_code);
void add_devices_command(CLI::App& app, int& exit_code);

}  // namespace kvonce::tool
