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

namespace espalier {
namespace {

std::string holder_text() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return fmt::format("process {} on {}\n", ::getpid(), host[0] == '\0' ? "localhost" : host.data());
}

// Who holds the lock. The file is empty for the moment between taking the lock and writing to it.
std::string read_holder(int descriptor) {
  for (int tries = 0; tries < 50; ++tries) {
    std::array<char, 512> text{};
    const ssize_t count = ::pread(descriptor, text.data(), text.size() - 1, 0);
    const std::string line(text.data(), count > 0 ? static_cast<size_t>(count) : 0);
    const size_t end = line.find('\n');
    if (end != std::string::npos) return line.substr(0, end);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return "another process";
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder,
                       const std::function<void(const std::string&)>& warn) {
  const std::filesystem::path path = folder / ".lock";
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  ESPALIER_CHECK(descriptor_ >= 0, "cannot write {}: {}", path.string(),
                 std::generic_category().message(errno));
  int result = 0;
  do {
    result = ::flock(descriptor_, LOCK_EX | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno == EWOULDBLOCK) {
    const std::string holder = read_holder(descriptor_);
    ::close(descriptor_);
    throw InputError(
        fmt::format("{}: {} is writing to this folder; wait until it has ended, or choose another",
                    folder.string(), holder));
  }
  if (result != 0) {
    if (warn) {
      warn(fmt::format("warning: {} cannot be locked ({}): make sure that no other run writes to it",
                       folder.string(), std::generic_category().message(errno)));
    }
    return;
  }
  held_ = true;
  // Only a message uses the content of the file, so failing to write it is not an error.
  const std::string text = holder_text();
  if (::ftruncate(descriptor_, 0) == 0) {
    [[maybe_unused]] const ssize_t written = ::pwrite(descriptor_, text.data(), text.size(), 0);
  }
}

FolderLock::~FolderLock() {
  // The file is emptied while the lock is still held, so that no message names this process for the next
  // holder.
  if (held_) [[maybe_unused]]
    const int ignored = ::ftruncate(descriptor_, 0);
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace espalier
