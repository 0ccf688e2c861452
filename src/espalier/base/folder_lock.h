// SPDX-License-Identifier: Apache-2.0
// A lock on a folder, so that two processes never write to it at the same time.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace espalier {

/// Holds FOLDER/.lock from construction to destruction. It uses flock, so the kernel releases the lock
/// however the process ends. The file stays.
class FolderLock {
 public:
  /// Throws InputError naming the holder's process and host if another process, or another FolderLock of this
  /// process, has the lock. Waits up to 10 s for a holder that has not written its name, because it has just
  /// started or is about to end. On file systems without locks nothing is locked and `warn` is called.
  FolderLock(const std::filesystem::path& folder, const std::function<void(const std::string&)>& warn);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  bool held() const { return held_; }
  /// Whether FOLDER/.lock is still the file of this lock. If it is not, another process may have locked a new
  /// folder of the same name.
  bool is_in_place() const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  bool held_ = false;
};

}  // namespace espalier
