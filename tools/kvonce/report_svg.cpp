// The bar chart: one panel per geometry, one group of bars per cache length, the read arm as a line over its group.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "kvonce/report.hpp"

namespace kvonce::tool {
namespace {

// Pixels.
constexpr double kPanelWidth = 440;
constexpr double kPanelHeight = 300;
constexpr double kPlotLeft = 52;
constexpr double kPlotRight = 16;
constexpr double kPlotTop = 44;
constexpr double kPlotBottom = 44;
constexpr double kHeader = 72;
constexpr double kMaxBarWidth = 38;

struct ArmStyle {
  std::string_view arm;
  std::string_view color;
};
constexpr ArmStyle kBars[] = {{"kvonce", "#1b6ca8"}, {"per_head", "#e08e45"}, {"qmv", "#9aa5ad"}, {"floor", "#6b8f71"}};
constexpr std::string_view kReadColor = "#b3261e";

std::string escape(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        // Control characters are not XML, whatever the escape.
        escaped += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return escaped;
}

std::string text_at(double x, double y, std::string_view anchor, std::string_view css, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" class=\"{}\">{}</text>\n", x, y, anchor, css,
                     escape(text));
}

std::string line(double x1, double y1, double x2, double y2, std::string_view color, double width) {
  return fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{}\"/>\n", x1, y1, x2,
      y2, color, width);
}

std::string rect(double x, double y, double width, double height, std::string_view color) {
  return fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n", x, y, width,
                     height, color);
}

// Rows of one geometry: everything but the cache length is the same.
struct Panel {
  std::string title;
  std::vector<std::vector<const BenchRow*>> groups;  // one per case
};

std::string title_of(const BenchRow& row) {
  std::string title = fmt::format("{}q/{}kv d{}", row.num_q_heads, row.num_kv_heads, row.head_dim_qk);
  if (row.head_dim_v != row.head_dim_qk) title += fmt::format("x{}", row.head_dim_v);
  title += fmt::format(" {}", row.kv_dtype);
  if (row.q_len != 1) title += fmt::format(" q={}", row.q_len);
  if (row.num_seqs != 1) title += fmt::format(" seqs={}", row.num_seqs);
  return title + fmt::format(", group {}", row.num_q_heads / row.num_kv_heads);
}

std::vector<Panel> make_panels(const std::vector<BenchRow>& rows) {
  std::vector<Panel> panels;
  const BenchRow* previous = nullptr;
  for (const BenchRow& row : rows) {
    const std::string title = title_of(row);
    auto panel = std::find_if(panels.begin(), panels.end(), [&](const Panel& p) { return p.title == title; });
    if (panel == panels.end()) panel = panels.insert(panels.end(), Panel{title, {}});
    // The arms of a case follow each other: another case text, or an arm seen already, opens the next group.
    bool same_case = previous != nullptr && !panel->groups.empty() && previous->case_text == row.case_text &&
                     previous->kv_dtype == row.kv_dtype;
    if (same_case) {
      for (const BenchRow* other : panel->groups.back()) same_case = same_case && other->arm != row.arm;
    }
    if (!same_case) panel->groups.emplace_back();
    panel->groups.back().push_back(&row);
    previous = &row;
  }
  return panels;
}

// A round number of GB/s at or above `value`, in `steps` equal steps.
double axis_top(double value, int& steps) {
  const double power = std::pow(10.0, std::floor(std::log10(std::max(value, 1e-9))));
  for (const double factor : {1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0}) {
    if (factor * power < value) continue;
    steps = factor == 1.5 || factor == 3.0 || factor == 6.0    ? 3
            : factor == 2.5 || factor == 5.0 || factor == 10.0 ? 5
                                                               : 4;
    return factor * power;
  }
  steps = 5;
  return 10.0 * power;
}

std::string short_tokens(std::int64_t tokens) {
  return tokens >= 1024 && tokens % 1024 == 0 ? fmt::format("{}K", tokens / 1024) : fmt::format("{}", tokens);
}

std::string draw_group(const std::vector<const BenchRow*>& group, double left, double width, double base,
                       double scale) {
  std::string svg;
  std::vector<std::pair<const BenchRow*, std::string_view>> bars;
  const BenchRow* read = nullptr;
  for (const BenchRow* row : group) {
    if (row->arm == "read") read = row;
    for (const ArmStyle& style : kBars) {
      if (style.arm == row->arm) bars.emplace_back(row, style.color);
    }
  }
  const double bar_width =
      std::min(kMaxBarWidth, width * 0.8 / std::max<double>(1.0, static_cast<double>(bars.size())));
  const double bars_width = bar_width * static_cast<double>(bars.size());
  double x = left + (width - bars_width) / 2;
  for (const auto& [row, color] : bars) {
    const double height = row->gbps * scale;
    svg += rect(x + 1, base - height, bar_width - 2, height, color);
    const bool inside = height > 18;  // the figure stays clear of the read line's
    svg += text_at(x + bar_width / 2, base - height + (inside ? 11 : -4), "middle", inside ? "inside" : "value",
                   fmt::format("{:.1f}", row->gbps));
    x += bar_width;
  }
  if (read != nullptr) {
    const double y = base - read->gbps * scale;
    svg += line(left + width * 0.04, y, left + width * 0.96, y, kReadColor, 2);
    svg += text_at(left + width * 0.04, y - 4, "start", "read", fmt::format("{:.1f}", read->gbps));
  }
  return svg + text_at(left + width / 2, base + 16, "middle", "label", short_tokens(group.front()->kv_len));
}

std::string draw_panel(const Panel& panel, double left, double top, double axis_gbps, int steps) {
  const double plot_left = left + kPlotLeft;
  const double plot_width = kPanelWidth - kPlotLeft - kPlotRight;
  const double base = top + kPanelHeight - kPlotBottom;
  const double plot_height = kPanelHeight - kPlotTop - kPlotBottom;
  const double scale = plot_height / axis_gbps;
  std::string svg = text_at(plot_left, top + 20, "start", "title", panel.title);
  for (int step = 0; step <= steps; ++step) {
    const double gbps = axis_gbps * step / steps;
    const double y = base - gbps * scale;
    svg += line(plot_left, y, plot_left + plot_width, y, step == 0 ? "#444444" : "#e3e6e8", 1);
    svg += text_at(plot_left - 6, y + 4, "end", "label", fmt::format("{:.4g}", gbps));
  }
  const double width = plot_width / static_cast<double>(panel.groups.size());
  for (std::size_t i = 0; i < panel.groups.size(); ++i) {
    svg += draw_group(panel.groups[i], plot_left + static_cast<double>(i) * width, width, base, scale);
  }
  return svg + text_at(plot_left + plot_width / 2, base + 34, "middle", "label", "kv_len, tokens");
}

std::string draw_legend(const std::vector<BenchRow>& rows, double left, double y) {
  std::string svg;
  for (const ArmStyle& style : kBars) {
    if (std::none_of(rows.begin(), rows.end(), [&](const BenchRow& row) { return row.arm == style.arm; })) continue;
    svg += rect(left, y - 10, 12, 12, style.color);
    svg += text_at(left + 18, y, "start", "label", std::string(style.arm));
    left += 90;
  }
  svg += line(left, y - 4, left + 20, y - 4, kReadColor, 2);
  return svg + text_at(left + 26, y, "start", "label", "read (ceiling); GB/s of K and V, each byte counted once");
}

}  // namespace

std::string render_svg(const BenchReport& report) {
  const std::vector<Panel> panels = make_panels(report.rows);
  const std::size_t num_columns = panels.size() > 1 ? 2 : 1;
  const std::size_t num_lines = (panels.size() + num_columns - 1) / num_columns;
  const double width = std::max(620.0, kPanelWidth * static_cast<double>(num_columns));
  const double height = kHeader + kPanelHeight * static_cast<double>(num_lines);
  double highest = 0.0;
  for (const BenchRow& row : report.rows) highest = std::max(highest, row.gbps);
  int steps = 1;
  const double axis_gbps = axis_top(highest * 1.06, steps);  // one axis for all panels; room for the figures

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "role=\"img\" aria-label=\"Decode attention bandwidth by arm\">\n"
      "<style>text{{font-family:Helvetica,Arial,sans-serif;fill:#222222}}.head{{font-size:15px;font-weight:bold}}"
      ".title{{font-size:13px;font-weight:bold}}.label{{font-size:11px;fill:#555555}}.value{{font-size:9px}}"
      ".inside{{font-size:9px;fill:#ffffff}}.read{{font-size:9px;fill:{2}}}</style>\n",
      width, height, kReadColor);
  svg += rect(0, 0, width, height, "#ffffff");
  const BenchDevice& device = report.device;
  const std::string width_text = device.backend == Backend::cuda
                                     ? fmt::format("{} SMs", device.num_sms)
                                     : fmt::format("{} thread{}", device.threads, device.threads == 1 ? "" : "s");
  svg += text_at(16, 26, "start", "head",
                 fmt::format("kvonce {}: {}, {}, {}", report.kvonce_version, device.name, device.target, width_text));
  svg += draw_legend(report.rows, 16, 50);
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const double left = kPanelWidth * static_cast<double>(i % num_columns);
    const double top = kHeader + kPanelHeight * static_cast<double>(i / num_columns);
    svg += draw_panel(panels[i], left, top, axis_gbps, steps);
  }
  return svg + "</svg>\n";
}

}  // namespace kvonce::tool
