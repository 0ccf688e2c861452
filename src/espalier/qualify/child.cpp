// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/interrupt.h"

namespace espalier::qualify {
namespace {

using Clock = std::chrono::steady_clock;

// Reads a pipe that a child writes to, and keeps the last bytes.
class Listener {
 public:
  Listener() {
    ESPALIER_CHECK(::pipe2(ends_.data(), O_CLOEXEC) == 0, "cannot make a pipe: {}", std::strerror(errno));
    ::fcntl(ends_[0], F_SETFL, O_NONBLOCK);
  }
  ~Listener() {
    for (const int end : ends_) {
      if (end >= 0) ::close(end);
    }
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int writer() const { return ends_[1]; }
  void close_writer() { ::close(std::exchange(ends_[1], -1)); }

  /// Waits briefly for output.
  void listen() {
    constexpr int kMilliseconds = 20;
    pollfd entry{.fd = open_ ? ends_[0] : -1, .events = POLLIN, .revents = 0};
    if (::poll(&entry, 1, kMilliseconds) > 0) read_all();
  }

  void read_all() {
    constexpr size_t kKept = 4096;
    std::array<char, 4096> buffer;
    ssize_t count = 0;
    while ((count = ::read(ends_[0], buffer.data(), buffer.size())) > 0) {
      text_.append(buffer.data(), static_cast<size_t>(count));
      if (text_.size() > kKept) text_.erase(0, text_.size() - kKept);
    }
    open_ = count < 0;  // at end of file poll would return immediately
  }

  std::string last_line() const {
    const size_t end = text_.find_last_not_of("\r\n");
    if (end == std::string::npos) return "";
    const size_t before = text_.find_last_of("\r\n", end);
    const size_t begin = before == std::string::npos ? 0 : before + 1;
    return text_.substr(begin, end + 1 - begin);
  }

 private:
  std::array<int, 2> ends_{-1, -1};
  bool open_ = true;
  std::string text_;
};

// Descriptors and signal settings of a child.
class Preparation {
 public:
  explicit Preparation(int errors) {
    ::posix_spawn_file_actions_init(&files_);
    ::posix_spawn_file_actions_addopen(&files_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_addopen(&files_, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    ::posix_spawn_file_actions_adddup2(&files_, errors, STDERR_FILENO);
    ::posix_spawnattr_init(&attributes_);
    sigset_t all, none;
    ::sigfillset(&all);
    ::sigemptyset(&none);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  }
  ~Preparation() {
    ::posix_spawn_file_actions_destroy(&files_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  Preparation(const Preparation&) = delete;
  Preparation& operator=(const Preparation&) = delete;

  /// Returns 0 or an errno.
  int spawn(std::vector<std::string> command, pid_t* process) const {
    std::vector<char*> arguments;
    for (std::string& word : command) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    return ::posix_spawn(process, arguments[0], &files_, &attributes_, arguments.data(), environ);
  }

 private:
  posix_spawn_file_actions_t files_;
  posix_spawnattr_t attributes_;
};

// Kills the process by SIGKILL unless it has ended. A process stuck in a driver may not die, and is abandoned
// after a while.
class Process {
 public:
  explicit Process(pid_t id) : id_(id) {}
  ~Process() {
    if (ended_) return;
    constexpr int kTries = 250;
    ::kill(id_, SIGKILL);
    for (int i = 0; i < kTries && !has_ended(); ++i) ::poll(nullptr, 0, 20);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool has_ended() {
    if (!ended_) ended_ = ::waitpid(id_, &status_, WNOHANG) == id_;
    return ended_;
  }
  int status() const { return status_; }

 private:
  pid_t id_;
  int status_ = 0;
  bool ended_ = false;
};

}  // namespace

ChildEnd run_child(const std::vector<std::string>& command, std::chrono::milliseconds limit) {
  ESPALIER_ASSERT(!command.empty());
  Listener listener;
  pid_t id = 0;
  if (const int error = Preparation(listener.writer()).spawn(command, &id); error != 0) {
    return {ChildEnd::How::kNotStarted, error, ""};
  }
  listener.close_writer();
  const Clock::time_point end = Clock::now() + limit;
  Process process(id);
  while (!process.has_ended()) {
    check_interrupt();
    listener.listen();
    if (Clock::now() >= end && !process.has_ended()) {
      return {ChildEnd::How::kTimedOut, 0, listener.last_line()};
    }
  }
  listener.read_all();
  const int status = process.status();
  if (WIFSIGNALED(status)) return {ChildEnd::How::kKilled, WTERMSIG(status), listener.last_line()};
  return {ChildEnd::How::kExited, WEXITSTATUS(status), listener.last_line()};
}

std::string describe(const ChildEnd& end, std::chrono::milliseconds limit) {
  const std::string said = end.last_line.empty() ? "" : ": " + end.last_line;
  switch (end.how) {
    case ChildEnd::How::kExited:
      return fmt::format("exited with status {}{}", end.code, said);
    case ChildEnd::How::kKilled:
      return fmt::format("was killed by signal {} ({}){}", end.code, ::strsignal(end.code), said);
    case ChildEnd::How::kTimedOut:
      return fmt::format("did not end within {:g} s{}", static_cast<double>(limit.count()) / 1000, said);
    case ChildEnd::How::kNotStarted:
      return fmt::format("cannot be started: {}", std::strerror(end.code));
  }
  return "";
}

}  // namespace espalier::qualify
