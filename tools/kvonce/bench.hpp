// kvonce bench: decode attention next to the per-head form, a pure read and a dense matrix-vector product.
#pragma once

namespace CLI {
class App;
}

namespace kvonce::tool {

/// Adds the subcommand. When the user chose it, parsing runs it, sets `exit_code` (0 ok, 1 a result was wrong) and
/// throws Error for what main() reports.
void add_bench_command(CLI::App& app, int& exit_code);

}  // namespace kvonce::tool
