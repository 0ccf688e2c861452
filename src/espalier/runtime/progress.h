// SPDX-License-Identifier: Apache-2.0
// Progress of long work on standard error: a bar on a terminal, plain lines in a pipe.
#pragma once

#include <chrono>
#include <string>

namespace espalier {

/// On a terminal redraws one line; otherwise prints a line when ten seconds have passed since the last one.
/// Nothing is drawn for work that ends within half a second. The label is the current work that
/// out_of_memory_text names. Text is passed through base/printable.h.
class Progress {
 public:
  explicit Progress(const std::string& label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// fraction in [0, 1]; detail is shown after the bar.
  void update(double fraction, const std::string& detail = "");
  /// Prints a whole line, leaving the bar below it.
  void line(const std::string& text);
  void relabel(const std::string& label);

 private:
  using Clock = std::chrono::steady_clock;
  void erase();

  std::string label_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
};

/// A message with advice for running out of memory in the current work. Thread-safe.
std::string out_of_memory_text();

}  // namespace espalier
