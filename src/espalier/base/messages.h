// SPDX-License-Identifier: Apache-2.0
// What the library says of long work. It prints nothing itself: whoever runs it may listen.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string>
#include <utility>

#include "espalier/base/printable.h"

namespace espalier {

/// The functions may be called from any thread, also at the same time. They must not throw.
struct Listener {
  /// One or several whole lines, without a final line feed, safe to print (base/printable.h).
  std::function<void(const std::string& text)> line{};
  /// How far the current work is, in [0, 1] (runtime/progress.h: at most ten times a second).
  std::function<void(const std::string& work, double fraction, const std::string& detail)> progress{};
  /// The current work has ended.
  std::function<void()> end{};
};

/// From now on messages of this library go to `listener` in place of the one before; without one they are
/// dropped.
void listen(Listener listener);

/// Passes one or several whole lines to the listener, as they are.
void send_line(const std::string& text);
void send_progress(const std::string& work, double fraction, const std::string& detail);
void send_end();

/// Sends one or several whole lines, control characters escaped.
template <typename... Args>
void log_line(fmt::format_string<Args...> format, Args&&... args) {
  send_line(printable_lines(fmt::format(format, std::forward<Args>(args)...)));
}

}  // namespace espalier
