// What the command prints: tables in three forms, and a progress line for work that takes long.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvonce::tool {

enum class Format : std::uint8_t { md, csv, json };

/// Rows of cells: strings, numbers, booleans, or null for "nothing to say".
struct Table {
  std::vector<std::string> columns;
  std::vector<std::vector<nlohmann::json>> rows;
};

/// A Markdown table, comma-separated values (quoted where needed), or a JSON array of objects. Ends in a newline.
std::string render(const Table& table, Format format);
/// The rows as JSON objects.
nlohmann::ordered_json to_json(const Table& table);

/// Writes to standard output. Throws Error{InvalidArgument} when it cannot be written.
void print(const std::string& text);

/// Throws Error{InvalidArgument} naming the option when a file cannot be written: known before the work starts, and
/// without leaving a file behind when the work then fails.
void require_writable(const std::string& option, const std::string& path);
/// Writes a whole file. Errors as require_writable().
void write_output(const std::string& option, const std::string& path, const std::string& text);

/// One line on standard error, rewritten in place: shown only on a terminal and only for work over two seconds.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void update(std::int64_t done, std::int64_t total = 0);  // total 0: not known

 private:
  std::string what_;
  std::chrono::steady_clock::time_point next_;  // before this nothing is shown
  bool is_terminal_;
  bool is_shown_ = false;
};

}  // namespace kvonce::tool
