#include "statistics.hpp"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "kvonce_ggml.h"

namespace kvonce::ggml {
namespace {

using Counts = std::map<std::string, std::int64_t, std::less<>>;

void add_one(Counts& counts, std::string_view name) {
  const auto found = counts.find(name);
  if (found != counts.end()) {
    ++found->second;
  } else {
    counts.emplace(name, 1);
  }
}

class Statistics {
 public:
  Statistics() = default;
  Statistics(const Statistics&) = delete;
  Statistics& operator=(const Statistics&) = delete;

  ~Statistics() {
    const char* wanted = std::getenv("KVONCE_GGML_STATS");
    if (wanted != nullptr && *wanted != '\0' && std::string_view(wanted) != "0") std::fputs(text().c_str(), stderr);
  }

  void served(std::string_view kernel_id, std::int64_t tokens) {
    const std::lock_guard lock(mutex_);
    ++totals_.ops_served;
    totals_.tokens_served += tokens;
    add_one(kernels_, kernel_id);
  }
  void threads(bool on_team) {
    const std::lock_guard lock(mutex_);
    threads_ = on_team ? "the OpenMP threads of ggml's CPU backend" : "threads of its own";
  }
  void claimed() {
    const std::lock_guard lock(mutex_);
    has_claimed_ = true;
  }
  void failed() {
    const std::lock_guard lock(mutex_);
    ++totals_.ops_failed;
  }
  void declined(std::string_view reason) {
    const std::lock_guard lock(mutex_);
    ++totals_.times_declined;
    add_one(reasons_, reason);
  }

  kvonce_ggml_statistics totals() {
    const std::lock_guard lock(mutex_);
    return totals_;
  }

  std::string text() {
    const std::lock_guard lock(mutex_);
    std::string lines = "kvonce for ggml: served " + std::to_string(totals_.ops_served) + " attention ops with " +
                        std::to_string(totals_.tokens_served) + " query tokens, failed " +
                        std::to_string(totals_.ops_failed) + ", declined " + std::to_string(totals_.times_declined) +
                        " times\n";
    if (has_claimed_ && totals_.ops_served + totals_.ops_failed == 0) {
      lines += "  ops were claimed, and none was run: is flash attention \"auto\"? It must be on (-fa on)\n";
    }
    if (totals_.ops_served > 0) lines += "  on " + std::string(threads_) + "\n";
    for (const auto& [kernel, count] : kernels_) lines += "  " + std::to_string(count) + " by " + kernel + "\n";
    for (const auto& [reason, count] : reasons_) lines += "  declined " + std::to_string(count) + ": " + reason + "\n";
    return lines;
  }

 private:
  std::mutex mutex_;
  kvonce_ggml_statistics totals_{};
  bool has_claimed_ = false;
  std::string_view threads_;
  Counts kernels_;
  Counts reasons_;
};

Statistics& statistics() {
  static Statistics all;
  return all;
}

}  // namespace

void start_statistics() { statistics(); }
void count_served(std::string_view kernel_id, std::int64_t tokens) { statistics().served(kernel_id, tokens); }
void note_threads(bool on_team) { statistics().threads(on_team); }
void note_claimed() { statistics().claimed(); }
void count_failed() { statistics().failed(); }
void count_declined(std::string_view reason) { statistics().declined(reason); }

}  // namespace kvonce::ggml

void kvonce_ggml_get_statistics(kvonce_ggml_statistics* statistics) {
  *statistics = kvonce::ggml::statistics().totals();
}

const char* kvonce_ggml_statistics_text() {
  static thread_local std::string text;
  text = kvonce::ggml::statistics().text();
  return text.c_str();
}
