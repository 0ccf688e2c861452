// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "espalier/base/temporaries.h"

namespace espalier::cli {
namespace {

constexpr int kEndingSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

struct sigaction original_pipe, original_file_size, original_hangup;  // at the start
std::atomic<std::atomic<bool>*> stop_flag{nullptr};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<void*>::is_always_lock_free);

void handle(int signal, void (*handler)(int), int flags) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = flags;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(signal, &action, nullptr);
}

struct sigaction action_of(int signal) {
  struct sigaction action{};
  ::sigaction(signal, nullptr, &action);
  return action;
}

// SA_RESETHAND has put back the default, which the signal meets when it comes the second time.
void clean_up_and_die(int signal) {
  remove_registered_temporaries();
  ::raise(signal);
}

void request_stop(int) {
  *stop_flag.load() = true;
}

void open_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    // The lowest free number is taken, which is this one. Reading from a stream that is open for writing
    // fails, and the other way round.
    if (::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) return;
  }
}

}  // namespace

void prepare_process() {
  open_standard_streams();
  original_pipe = action_of(SIGPIPE);
  original_file_size = action_of(SIGXFSZ);
  original_hangup = action_of(SIGHUP);
  handle(SIGPIPE, SIG_IGN, 0);
  handle(SIGXFSZ, SIG_IGN, 0);
  for (const int signal : kEndingSignals) {
    if (action_of(signal).sa_handler != SIG_IGN) handle(signal, clean_up_and_die, SA_RESETHAND);
  }
}

void stop_on_signals(std::atomic<bool>* stop) {
  stop_flag = stop;
  handle(SIGINT, request_stop, SA_RESTART);
  handle(SIGTERM, request_stop, SA_RESTART);
  if (original_hangup.sa_handler != SIG_IGN) handle(SIGHUP, request_stop, SA_RESTART);
}

void restore_signals() {
  ::sigaction(SIGPIPE, &original_pipe, nullptr);
  ::sigaction(SIGXFSZ, &original_file_size, nullptr);
}

void die_of_closed_pipe() {
  handle(SIGPIPE, SIG_DFL, 0);
  ::raise(SIGPIPE);
  std::_Exit(128 + SIGPIPE);  // where the signal is blocked
}

}  // namespace espalier::cli
