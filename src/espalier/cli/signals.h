// SPDX-License-Identifier: Apache-2.0
// What signals do to a command.
#pragma once

#include <atomic>

namespace espalier::cli {

/// For every command, before anything else. SIGINT, SIGTERM, SIGHUP and SIGQUIT remove temporary files before
/// they end the process as they always do; a SIGHUP that was ignored at the start (nohup) stays ignored. A
/// write to a closed pipe, and one beyond `ulimit -f`, becomes an error of that write instead of a signal.
/// Standard streams that are closed are opened in a way in which every write fails, so that no file of ours
/// gets their number.
void prepare_process();

/// From here on SIGINT, SIGTERM and SIGHUP (unless it was ignored at the start) set *stop instead.
void stop_on_signals(std::atomic<bool>* stop);

/// Before another program takes the place of this one: it shall find signals as this one found them.
void restore_signals();

/// Ends the process as SIGPIPE does: status 141 in a shell.
[[noreturn]] void die_of_closed_pipe();

}  // namespace espalier::cli
