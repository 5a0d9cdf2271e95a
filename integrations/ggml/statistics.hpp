// What was served and declined, counted over the process.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvonce::ggml {

/// Makes the counters, whose end prints them.
void start_statistics();

void count_served(std::string_view kernel_id, std::int64_t tokens);
void count_failed();
void count_declined(std::string_view reason);

}  // namespace kvonce::ggml
