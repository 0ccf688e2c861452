// SPDX-License-Identifier: Apache-2.0
// A program that is run as a process of its own, so that its crash or its hang is nobody else's.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace espalier::qualify {

struct ChildEnd {
  enum class How { kExited, kKilled, kTimedOut, kNotStarted };
  How how = How::kExited;
  int code = 0;             // exit status, signal, or errno of what could not be started
  std::string last_line{};  // the last line that it wrote to standard error, if any

  bool good() const { return how == How::kExited && code == 0; }
};

/// Runs the program command[0] (a path) with its arguments, waits until it has ended, and ends it by SIGKILL
/// after `limit`. It reads nothing, what it prints is dropped, and signals act on it as they do on a program
/// that a shell starts. Calls check_interrupt (base/interrupt.h) while it waits; where that throws, the child
/// is ended first.
ChildEnd run_child(const std::vector<std::string>& command, std::chrono::milliseconds limit);

/// "exited with status 3: no such file", "was killed by signal 11 (Segmentation fault)", "did not end within
/// 60 s" and the like.
std::string describe(const ChildEnd& end, std::chrono::milliseconds limit);

}  // namespace espalier::qualify
