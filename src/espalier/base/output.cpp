// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/output.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include "espalier/base/check.h"
#include "espalier/base/file.h"

namespace espalier {
namespace {

std::atomic<bool> is_silent{false};

[[noreturn]] void throw_output_error(int error) {
  if (error == EPIPE) throw ClosedPipe();
  throw InputError(fmt::format("cannot write to standard output: {}", system_message(error)));
}

}  // namespace

void silence_output() {
  is_silent = true;
}

void write_output(std::string_view text) {
  if (is_silent) return;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) throw_output_error(errno);
}

void flush_output() {
  if (std::fflush(stdout) != 0) throw_output_error(errno);
}

void write_log(std::string_view text) noexcept {
  while (!text.empty() && !is_silent) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace espalier
