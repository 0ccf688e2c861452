// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/output.h"
#include "espalier/base/temporaries.h"

namespace espalier::cli {
namespace {

constexpr int kEndingSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

struct sigaction original_pipe, original_file_size, original_hangup;  // at the start
std::atomic<StopRequest*> stop_request{nullptr};
std::atomic<int64_t> first_interrupt{0};  // in milliseconds; 0: none yet
bool on_terminal = false;
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<void*>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free);

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

// SA_RESETHAND has restored the default action, which handles the signal that is raised here.
void clean_up_and_die(int signal) {
  remove_registered_temporaries();
  ::raise(signal);
}

// The functions below run in signal handlers and must not allocate memory.

int64_t now_in_milliseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000} * now.tv_sec + now.tv_nsec / 1'000'000 + 1;
}

void say_what_is_finished(int64_t step) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof(digits), step).ptr;
  write_log(on_terminal ? "\n" : "");  // below the progress bar and ^C
  write_log("espalier: finishing step ");
  write_log({digits, static_cast<size_t>(end - digits)});
  write_log(", then saving; interrupt again to stop at once\n");
}

void request_stop(int signal) {
  const int error = errno;
  StopRequest* request = stop_request.load();
  const int64_t step = request->step.load();
  if (step == 0) {
    remove_registered_temporaries();
    write_log("espalier: stopped before the first step\n");
    std::_Exit(request->exit_code);
  }
  if (!request->requested.exchange(true)) say_what_is_finished(step);
  int64_t none = 0;
  constexpr int64_t kApart = 500;
  if (signal == SIGINT && !first_interrupt.compare_exchange_strong(none, now_in_milliseconds()) &&
      now_in_milliseconds() >= none + kApart) {
    handle(SIGINT, SIG_DFL, 0);
    clean_up_and_die(SIGINT);
  }
  errno = error;
}

void open_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    // open() returns the lowest free descriptor, which is this one. Reading from a descriptor opened for
    // writing fails, and vice versa.
    if (::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) return;
  }
}

}  // namespace

void prepare_process() {
  guard_mapped_files();
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

void stop_on_signals(StopRequest* request) {
  stop_request = request;
  on_terminal = ::isatty(STDERR_FILENO) != 0;
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
  std::_Exit(128 + SIGPIPE);  // reached if the signal is blocked
}

}  // namespace espalier::cli
