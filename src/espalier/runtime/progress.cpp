// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string_view>

#include "espalier/base/messages.h"
#include "espalier/base/option_names.h"
#include "espalier/base/printable.h"

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
        "out of memory while {}: use fewer trajectories ({}), or packed .safetensors, which stay on disk",
        current_work, named("limit"));
  }
  return fmt::format("out of memory{}: give a smaller {}, {} or {}, or {}",
                     current_work.empty() ? "" : " in " + current_work, named("memory-budget"),
                     named("token-budget"), named("batch-size"), named("checkpoint-activations", "layer"));
}

Progress::Progress(const std::string& label) : label_(printable(label)) {
  set_current_work(label_);
}

Progress::~Progress() {
  send_end();
  // Keep the name for the message of an error that ends the work.
  if (std::uncaught_exceptions() == 0) set_current_work("");
}

void Progress::update(double fraction, const std::string& detail) {
  const auto now = Clock::now();
  if (now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  send_progress(label_, std::clamp(fraction, 0.0, 1.0), printable(detail));
}

void Progress::line(const std::string& text) {
  log_line("{}", text);
}

void Progress::relabel(const std::string& label) {
  if (printable(label) == label_) return;
  label_ = printable(label);
  set_current_work(label_);
  last_ = Clock::now();
}

}  // namespace espalier
