// SPDX-License-Identifier: Apache-2.0
// A lock on a folder, so that two processes never write to it at the same time.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace espalier {

/// Holds FOLDER/.lock from construction to destruction, by flock, so the kernel releases it however the
/// process ends. The file stays and names the last holder.
class FolderLock {
 public:
  /// Throws InputError naming the holder's process and host if another process, or another FolderLock of this
  /// one, has the lock. Waits up to 10 s for a holder that has not named itself: it has just begun or is
  /// about to end. On file systems without locks, such as some network ones, nothing is locked and `warn` is
  /// called.
  FolderLock(const std::filesystem::path& folder, const std::function<void(const std::string&)>& warn);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  bool held() const { return held_; }
  /// Whether FOLDER/.lock is still the file of this lock. Where it is not, another process may have the lock
  /// of a folder of the same name.
  bool is_in_place() const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  bool held_ = false;
};

}  // namespace espalier
