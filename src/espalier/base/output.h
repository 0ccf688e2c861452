// SPDX-License-Identifier: Apache-2.0
// The two output streams of a command. Results go to standard output; a command that cannot write them fails.
// Everything else goes to standard error, where failures are ignored.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "espalier/base/printable.h"

namespace espalier {

/// The reader of standard output has closed it (a pipe into `head`). The command then ends silently.
class ClosedPipe : public std::runtime_error {
 public:
  ClosedPipe() : std::runtime_error("standard output is a closed pipe") {}
};

/// Writes to standard output, buffered by stdio. Throws InputError with the reason if that fails, ClosedPipe
/// if the reader has closed it.
void write_output(std::string_view text);

/// Flushes standard output before a command ends. Throws like write_output.
void flush_output();

template <typename... Args>
void print_output(fmt::format_string<Args...> format, Args&&... args) {
  write_output(fmt::format(format, std::forward<Args>(args)...));
}

/// Writes to standard error without buffering. Failures (full disk, closed pipe or terminal) are ignored.
void write_log(std::string_view text) noexcept;

/// From now on nothing is written to either stream: another process says the same.
void silence_output();

/// Writes one or several whole lines to standard error, control characters escaped (base/printable.h).
template <typename... Args>
void log_line(fmt::format_string<Args...> format, Args&&... args) {
  write_log(printable_lines(fmt::format(format, std::forward<Args>(args)...)) + "\n");
}

}  // namespace espalier
