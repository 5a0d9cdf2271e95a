#include "kvonce/output.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "kvonce/types.hpp"

namespace kvonce::tool {
namespace {

constexpr std::chrono::seconds kQuietTime{2};

std::string cell_text(const nlohmann::json& cell) {
  if (cell.is_null()) return "";
  if (cell.is_string()) return cell.get<std::string>();
  if (cell.is_boolean()) return cell.get<bool>() ? "yes" : "no";
  if (cell.is_number_float()) return fmt::format("{:.4g}", cell.get<double>());
  return cell.dump();
}

std::string csv_cell(const nlohmann::json& cell) {
  std::string text = cell.is_number_float() ? fmt::format("{}", cell.get<double>()) : cell_text(cell);
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string escaped = "\"";
  for (const char c : text) {
    if (c == '"') escaped += '"';
    escaped += c;
  }
  return escaped + '"';
}

std::string render_md(const Table& table) {
  std::vector<std::vector<std::string>> lines{table.columns};
  for (const auto& row : table.rows) {
    std::vector<std::string>& line = lines.emplace_back();
    for (const auto& cell : row) line.push_back(cell_text(cell));
  }
  std::vector<std::size_t> widths(table.columns.size(), 3);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (std::size_t l = 0; l < lines.size(); ++l) {
    for (std::size_t i = 0; i < lines[l].size(); ++i) text += fmt::format("| {:<{}} ", lines[l][i], widths[i]);
    text += "|\n";
    if (l > 0) continue;
    for (const std::size_t width : widths) text += fmt::format("|{:-<{}}", "", width + 2);
    text += "|\n";
  }
  return text;
}

std::string render_csv(const Table& table) {
  std::string text = fmt::format("{}\n", fmt::join(table.columns, ","));
  for (const auto& row : table.rows) {
    for (std::size_t i = 0; i < row.size(); ++i) text += (i > 0 ? "," : "") + csv_cell(row[i]);
    text += '\n';
  }
  return text;
}

[[noreturn]] void refuse_output(const std::string& option, const std::string& path) {
  throw Error(ErrorCode::InvalidArgument, fmt::format("{}: '{}' cannot be written", option, path));
}

}  // namespace

nlohmann::ordered_json to_json(const Table& table) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const auto& row : table.rows) {
    nlohmann::ordered_json object = nlohmann::ordered_json::object();
    for (std::size_t i = 0; i < row.size(); ++i) object[table.columns[i]] = row[i];
    rows.push_back(std::move(object));
  }
  return rows;
}

std::string render(const Table& table, Format format) {
  switch (format) {
    case Format::md:
      return render_md(table);
    case Format::csv:
      return render_csv(table);
    case Format::json:
      break;
  }
  return to_json(table).dump(2) + '\n';
}

void print(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!written || std::fflush(stdout) != 0) {
    throw Error(ErrorCode::InvalidArgument, "standard output: cannot be written");
  }
}

void require_writable(const std::string& option, const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path parent = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  std::error_code ignored;
  const bool is_file = fs::exists(path, ignored) && !fs::is_directory(path, ignored);
  const bool writable = is_file ? ::access(path.c_str(), W_OK) == 0
                                : !fs::exists(path, ignored) && ::access(parent.c_str(), W_OK | X_OK) == 0;
  if (!writable) refuse_output(option, path);
}

void write_output(const std::string& option, const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) refuse_output(option, path);
}

Progress::Progress(std::string what)
    : what_(std::move(what)),
      next_(std::chrono::steady_clock::now() + kQuietTime),
      is_terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (is_shown_) std::fputs("\r\033[K", stderr);
}

void Progress::update(std::int64_t done, std::int64_t total) {
  constexpr std::chrono::milliseconds kInterval{100};
  const auto now = std::chrono::steady_clock::now();
  if (!is_terminal_ || now < next_) return;
  next_ = now + kInterval;
  is_shown_ = true;
  const std::string of_total = total > 0 ? fmt::format("/{}", total) : "";
  fmt::print(stderr, "\r\033[K{} {}{}", what_, done, of_total);
  std::fflush(stderr);
}

}  // namespace kvonce::tool
