// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string_view>

#include "espalier/base/output.h"
#include "espalier/base/printable.h"
#include "espalier/base/units.h"

namespace espalier {
namespace {

std::mutex mutex;
std::string current_work;

constexpr std::string_view kReading = "reading ";

void set_current_work(const std::string& work) {
  const std::lock_guard lock(mutex);
  current_work = work;
}

}  // namespace

std::string out_of_memory_text() {
  const std::lock_guard lock(mutex);
  if (current_work.starts_with(kReading)) {
    return fmt::format(
        "out of memory while {}: use fewer trajectories (--limit), or packed .safetensors, which stay on "
        "disk",
        current_work);
  }
  return fmt::format(
      "out of memory{}: give a smaller --memory-budget, --token-budget or --batch-size, or "
      "--checkpoint-activations layer",
      current_work.empty() ? "" : " in " + current_work);
}

Progress::Progress(const std::string& label)
    : label_(printable(label)), terminal_(isatty(STDERR_FILENO) != 0) {
  set_current_work(label_);
}

Progress::~Progress() {
  erase();
  // Keep the name for the message of an error that ends the work.
  if (std::uncaught_exceptions() == 0) set_current_work("");
}

void Progress::erase() {
  if (drawn_) write_log("\r\033[K");
  drawn_ = false;
}

void Progress::update(double fraction, const std::string& raw_detail) {
  const auto now = Clock::now();
  const double since_start = std::chrono::duration<double>(now - start_).count();
  const double since_last = std::chrono::duration<double>(now - last_).count();
  if (since_start < 0.5 || since_last < (terminal_ ? 0.1 : 10.0)) return;
  last_ = now;
  const std::string detail = printable(raw_detail);
  fraction = std::clamp(fraction, 0.0, 1.0);
  const std::string left =
      fraction > 0.01 ? fmt::format(", {} left", human_seconds(since_start * (1 - fraction) / fraction)) : "";
  if (!terminal_) {
    log_line("{}: {:.0f}%{}{}{}", label_, fraction * 100, left, detail.empty() ? "" : "  ", detail);
    return;
  }
  constexpr int kWidth = 28;
  const int filled = static_cast<int>(fraction * kWidth);
  write_log(fmt::format("\r\033[K{} [{:=<{}}{: <{}}] {:.0f}%{}  {}", label_, "", filled, "", kWidth - filled,
                        fraction * 100, left, detail));
  drawn_ = true;
}

void Progress::line(const std::string& text) {
  erase();
  log_line("{}", text);
}

void Progress::relabel(const std::string& label) {
  if (printable(label) == label_) return;
  label_ = printable(label);
  set_current_work(label_);
  start_ = last_ = Clock::now();
}

}  // namespace espalier
