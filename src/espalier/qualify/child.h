// SPDX-License-Identifier: Apache-2.0
// Runs a program in a child process, isolated from crashes and hangs.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace espalier::qualify {

struct ChildEnd {
  enum class How { kExited, kKilled, kTimedOut, kNotStarted };
  How how = How::kExited;
  int code = 0;             // exit status, signal, or errno if it could not be started
  std::string last_line{};  // last line on standard error, if any

  bool good() const { return how == How::kExited && code == 0; }
};

/// Runs the program command[0] (a path) with its arguments, waits for it, and kills it by SIGKILL after
/// `limit`. Its standard input is empty, its standard output is discarded, and it has default signal
/// handlers. Calls check_interrupt (base/interrupt.h) while waiting; if that throws, the child is killed
/// first.
ChildEnd run_child(const std::vector<std::string>& command, std::chrono::milliseconds limit);

/// "exited with status 3: no such file", "was killed by signal 11 (Segmentation fault)", "did not end within
/// 60 s" and the like.
std::string describe(const ChildEnd& end, std::chrono::milliseconds limit);

}  // namespace espalier::qualify
