// SPDX-License-Identifier: Apache-2.0
// Progress of long work, for the listener of base/messages.h.
#pragma once

#include <chrono>
#include <string>

namespace espalier {

/// The label is the current work that out_of_memory_text names. Text is passed through base/printable.h.
class Progress {
 public:
  explicit Progress(const std::string& label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// fraction in [0, 1]; detail is what is done now.
  void update(double fraction, const std::string& detail = "");
  /// Says a whole line meanwhile.
  void line(const std::string& text);
  void relabel(const std::string& label);

 private:
  using Clock = std::chrono::steady_clock;

  std::string label_;
  Clock::time_point last_ = Clock::now();
};

/// A message with advice for running out of memory in the current work. Thread-safe.
std::string out_of_memory_text();

}  // namespace espalier
