// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/qualify.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/hash.h"
#include "espalier/base/interrupt.h"
#include "espalier/base/json_file.h"

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

namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// nullopt if the file is missing, damaged, or has another key.
std::optional<std::vector<Verdict>> read_verdicts(const fs::path& path, const Json& key,
                                                  const std::vector<std::string>& families) {
  std::ifstream file(path);
  const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("key", Json()) != key) return std::nullopt;
  const Json kept = json.value("verdicts", Json());
  std::vector<Verdict> verdicts;
  for (const std::string& family : families) {
    const Json verdict = kept.is_object() ? kept.value(family, Json()) : Json();
    if (!verdict.is_object()) return std::nullopt;
    const Json served = verdict.value("served", Json()), fault = verdict.value("fault", Json());
    if (!served.is_boolean() || !fault.is_string()) return std::nullopt;
    verdicts.push_back({.family = family, .served = served.get<bool>(), .fault = fault.get<std::string>()});
  }
  return verdicts;
}

void keep_verdicts(const std::vector<Verdict>& verdicts, const Json& key, const fs::path& path) {
  Json kept = Json::object();
  for (const Verdict& verdict : verdicts) {
    kept[verdict.family] = {{"served", verdict.served}, {"fault", verdict.fault}};
  }
  fs::create_directories(path.parent_path());
  write_text(path, Json{{"key", key}, {"verdicts", std::move(kept)}}.dump(2, ' ', false,
                                                                          Json::error_handler_t::replace) +
                       "\n");
}

// A temporary file, removed on destruction.
class FindingFile {
 public:
  FindingFile() {
    std::string name = (fs::temp_directory_path() / "espalier-finding-XXXXXX").string();
    const int descriptor = ::mkstemp(name.data());
    ESPALIER_CHECK(descriptor >= 0, "cannot create {}: {}", name, system_message(errno));
    ::close(descriptor);
    path_ = name;
  }
  ~FindingFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  FindingFile(const FindingFile&) = delete;
  FindingFile& operator=(const FindingFile&) = delete;

  const fs::path& path() const { return path_; }

  std::optional<Finding> read() const {
    std::ifstream file(path_);
    const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) return std::nullopt;
    const Json checks = json.value("checks", Json()), fault = json.value("fault", Json());
    if (!checks.is_number_integer() || !fault.is_string()) return std::nullopt;
    return Finding{checks.get<int64_t>(), fault.get<std::string>()};
  }

 private:
  fs::path path_;
};

Verdict judge(const std::string& family, const Qualification& qualification) {
  const FindingFile file;
  const ChildEnd end = run_child(qualification.command(family, file.path()), qualification.limit);
  if (!end.good()) {
    const bool gave_up = end.how == ChildEnd::How::kExited || end.how == ChildEnd::How::kNotStarted;
    return {.family = family,
            .served = true,
            .fault = "its check " + describe(end, qualification.limit),
            .lasting = !gave_up};
  }
  const std::optional<Finding> finding = file.read();
  if (!finding) return {.family = family, .served = true, .fault = "its check ended without a finding"};
  return {
      .family = family, .served = finding->checks > 0 || !finding->fault.empty(), .fault = finding->fault};
}

}  // namespace

void write_finding(const Finding& finding, const fs::path& file) {
  write_text(file, Json{{"checks", finding.checks}, {"fault", finding.fault}}.dump(
                       -1, ' ', false, Json::error_handler_t::replace));
}

fs::path verdict_file(const Json& key, const fs::path& folder) {
  Hasher hasher;
  const std::string text = key.dump();
  hasher.add(std::as_bytes(std::span(text)));
  return folder / fmt::format("kernels-{}.json", hasher.digits().substr(0, 16));
}

std::vector<Verdict> verdicts_on(const std::vector<std::string>& families,
                                 const Qualification& qualification) {
  const fs::path path = verdict_file(qualification.key, qualification.folder);
  if (!qualification.again) {
    if (auto kept = read_verdicts(path, qualification.key, families)) return *std::move(kept);
  }
  qualification.note(
      fmt::format("checking the kernels on this device (once for this build; kept in {})", path.string()));
  std::vector<Verdict> verdicts;
  for (const std::string& family : families) {
    const auto done = static_cast<double>(verdicts.size()) / static_cast<double>(families.size());
    qualification.progress(done, family);
    verdicts.push_back(judge(family, qualification));
  }
  if (!std::ranges::all_of(verdicts, &Verdict::lasting)) return verdicts;
  try {
    keep_verdicts(verdicts, qualification.key, path);
  } catch (const std::exception& error) {
    qualification.note(fmt::format("the verdicts cannot be saved: {}", error.what()));
  }
  return verdicts;
}

}  // namespace espalier::qualify
