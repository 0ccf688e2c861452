// SPDX-License-Identifier: Apache-2.0
// Signal handling of commands.
#pragma once

#include <atomic>
#include <cstdint>

namespace espalier::cli {

/// Called first by every command. SIGINT, SIGTERM, SIGHUP and SIGQUIT remove temporary files before they end
/// the process as usual; a SIGHUP that was ignored at the start (nohup) stays ignored. A write to a closed
/// pipe or beyond `ulimit -f` fails with an error instead of a signal. Closed standard streams are reopened
/// so that every access fails; otherwise a file opened later would get their descriptor. Guards mapped files.
void prepare_process();

/// A request to stop training, shared with the signal handlers.
struct StopRequest {
  std::atomic<bool> requested{false};
  std::atomic<int64_t> step{0};  // the current step, from 1; 0: training has not begun
  int exit_code = 0;             // of a stopped process
};

/// From now on SIGINT, SIGTERM and SIGHUP (unless ignored at the start) set request->requested and print on
/// standard error which step will be finished first. Before the first step there is nothing to save, so they
/// end the process with request->exit_code. A SIGINT half a second or more after the first ends the process
/// immediately; repeated SIGTERM and SIGHUP do not, because schedulers and terminals send them both to a
/// process group and to its processes.
void stop_on_signals(StopRequest* request);

/// Restores the original signal actions before exec.
void restore_signals();

/// Ends the process by SIGPIPE: status 141 in a shell.
[[noreturn]] void die_of_closed_pipe();

}  // namespace espalier::cli
