// What was served and declined, counted over the process.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvonce::ggml {

/// Makes the counters, whose end prints them.
void start_statistics();

void count_served(std::string_view kernel_id, std::int64_t tokens);
/// Whose threads run the work: the OpenMP team of ggml's CPU backend, or kvonce's own.
void note_threads(bool on_team);
/// supports_op said yes.
void note_claimed();
void count_failed();
void count_declined(std::string_view reason);

}  // namespace kvonce::ggml
