#include "espalier/cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace espalier::cli {

Progress::Progress(std::string label) : label_(std::move(label)), terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  erase();
}

void Progress::erase() {
  if (drawn_) fmt::print(stderr, "\r\033[K");
  drawn_ = false;
}

void Progress::update(double fraction, const std::string& detail) {
  const auto now = Clock::now();
  const double since_start = std::chrono::duration<double>(now - start_).count();
  const double since_last = std::chrono::duration<double>(now - last_).count();
  if (since_start < 0.5 || since_last < (terminal_ ? 0.1 : 10.0)) return;
  last_ = now;
  fraction = std::clamp(fraction, 0.0, 1.0);
  const std::string left =
      fraction > 0.01 ? fmt::format(", {} left", human_seconds(since_start * (1 - fraction) / fraction)) : "";
  if (!terminal_) {
    fmt::print(stderr, "{}: {:.0f}%{}{}{}\n", label_, fraction * 100, left, detail.empty() ? "" : "  ",
               detail);
    return;
  }
  constexpr int kWidth = 28;
  const int filled = static_cast<int>(fraction * kWidth);
  fmt::print(stderr, "\r\033[K{} [{:=<{}}{: <{}}] {:.0f}%{}  {}", label_, "", filled, "", kWidth - filled,
             fraction * 100, left, detail);
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::line(const std::string& text) {
  erase();
  fmt::print(stderr, "{}\n", text);
}

void Progress::relabel(const std::string& label) {
  if (label == label_) return;
  label_ = label;
  start_ = last_ = Clock::now();
}

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value < 0 ? -value : value);
  for (size_t i = digits.size(); i > 3;) digits.insert(digits.begin() + static_cast<int64_t>(i -= 3), ',');
  return value < 0 ? "-" + digits : digits;
}

std::string human_bytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, units[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds < 60) return fmt::format("{:.0f}s", seconds);
  const int64_t whole = static_cast<int64_t>(seconds);
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  return fmt::format("{}h {:02}m", whole / 3600, whole / 60 % 60);
}

}  // namespace espalier::cli
