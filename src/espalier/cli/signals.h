// SPDX-License-Identifier: Apache-2.0
// What signals do to a command.
#pragma once

#include <atomic>
#include <cstdint>

namespace espalier::cli {

/// For every command, before anything else. SIGINT, SIGTERM, SIGHUP and SIGQUIT remove temporary files before
/// they end the process as they always do; a SIGHUP that was ignored at the start (nohup) stays ignored. A
/// write to a closed pipe, and one beyond `ulimit -f`, becomes an error of that write instead of a signal.
/// Standard streams that are closed are opened in a way in which every write fails, so that no file of ours
/// gets their number.
void prepare_process();

/// A wish to stop, and what the run is doing meanwhile.
struct StopRequest {
  std::atomic<bool> requested{false};
  std::atomic<int64_t> step{0};  // the one that is computed, from 1; 0: nothing is done yet
  int exit_code = 0;             // of a run that is stopped
};

/// From here on SIGINT, SIGTERM and SIGHUP (unless it was ignored at the start) set request->requested
/// instead, and say at once on standard error what the run finishes before it stops. Before the first step
/// there is nothing to save, so they end the process with request->exit_code. A SIGINT that comes half a
/// second or more after the first ends the process at once; repeated SIGTERM and SIGHUP do not, because
/// schedulers and terminals send them to a group and to its processes.
void stop_on_signals(StopRequest* request);

/// Before another program takes the place of this one: it shall find signals as this one found them.
void restore_signals();

/// Ends the process as SIGPIPE does: status 141 in a shell.
[[noreturn]] void die_of_closed_pipe();

}  // namespace espalier::cli
