// SPDX-License-Identifier: Apache-2.0
// The two streams of a command. Results go to standard output: a command whose results cannot be written has
// failed. Everything else goes to standard error, and nothing that happens there stops a command.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "espalier/base/printable.h"

namespace espalier {

/// The reader of standard output has gone (a pipe into `head`): the command ends without a word.
class ClosedPipe : public std::runtime_error {
 public:
  ClosedPipe() : std::runtime_error("standard output is a closed pipe") {}
};

/// Adds to standard output, which is buffered as stdio does. Throws InputError with the reason where it
/// cannot be written, ClosedPipe where nobody reads it any more.
void write_output(std::string_view text);

/// Writes what is in the buffer; fails likewise. Called before a command ends.
void flush_output();

template <typename... Args>
void print_output(fmt::format_string<Args...> format, Args&&... args) {
  write_output(fmt::format(format, std::forward<Args>(args)...));
}

/// Writes to standard error at once. A full disk, a closed pipe or terminal is passed over in silence.
void write_log(std::string_view text) noexcept;

/// A whole line, or several, with what acts on a terminal written out (base/printable.h).
template <typename... Args>
void log_line(fmt::format_string<Args...> format, Args&&... args) {
  write_log(printable_lines(fmt::format(format, std::forward<Args>(args)...)) + "\n");
}

}  // namespace espalier
