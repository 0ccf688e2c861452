// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#include "espalier/base/check.h"
#include "espalier/base/file.h"

namespace espalier {
namespace {

constexpr int kTries = 500;
constexpr auto kBetweenTries = std::chrono::milliseconds(20);

std::string holder_text() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return fmt::format("process {} on {}\n", ::getpid(), host[0] == '\0' ? "localhost" : host.data());
}

// The line that the holder wrote, or "" if there is none yet.
std::string read_holder(int descriptor) {
  std::array<char, 512> text{};
  const ssize_t count = ::pread(descriptor, text.data(), text.size() - 1, 0);
  const std::string line(text.data(), count > 0 ? static_cast<size_t>(count) : 0);
  const size_t end = line.find('\n');
  return end == std::string::npos ? std::string() : line.substr(0, end);
}

// Takes the lock without waiting. Returns 0 or an errno.
int try_lock(int descriptor) {
  while (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// Takes the lock and returns 0, or returns an errno: EWOULDBLOCK with the holder's line if another process
// has it. A holder without a line has just started or is about to end, so the lock is retried for a while.
int take_lock(int descriptor, std::string& holder) {
  int error = EWOULDBLOCK;
  for (int tries = 0; tries < kTries && error == EWOULDBLOCK && holder.empty(); ++tries) {
    if (tries > 0) std::this_thread::sleep_for(kBetweenTries);
    error = try_lock(descriptor);
    if (error == EWOULDBLOCK) holder = read_holder(descriptor);
  }
  return error;
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder,
                       const std::function<void(const std::string&)>& warn)
    : path_(folder / ".lock") {
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  ESPALIER_CHECK(descriptor_ >= 0, "cannot write {}: {}", path_.string(),
                 std::generic_category().message(errno));
  std::string holder;
  const int error = take_lock(descriptor_, holder);
  if (error == EWOULDBLOCK) {
    ::close(descriptor_);
    throw InputError(
        fmt::format("{}: {} is writing to this folder; wait until it has ended, or choose another folder",
                    folder.string(), holder.empty() ? "another process" : holder));
  }
  if (error != 0) {
    if (warn) {
      warn(fmt::format("warning: cannot lock {} ({}): make sure that no other process writes to it",
                       folder.string(), std::generic_category().message(error)));
    }
    return;
  }
  held_ = true;
  // Only messages use the content of the file, so a failure to write it is ignored.
  const std::string text = holder_text();
  if (::ftruncate(descriptor_, 0) == 0) {
    [[maybe_unused]] const ssize_t written = ::pwrite(descriptor_, text.data(), text.size(), 0);
  }
}

bool FolderLock::is_in_place() const {
  return still_names(path_, descriptor_);
}

FolderLock::~FolderLock() {
  // Emptied while the lock is still held, so that no message names this process as the next holder.
  if (held_) [[maybe_unused]]
    const int ignored = ::ftruncate(descriptor_, 0);
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace espalier
