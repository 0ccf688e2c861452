// SPDX-License-Identifier: Apache-2.0
// The folder of a training run, which is restored if it is removed during the run.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/folder_lock.h"

namespace espalier {

/// A text file in the folder of a run.
struct RunFile {
  std::string name, text;
};

class RunFolder {
 public:
  using Note = std::function<void(const std::string&)>;

  /// Creates the folder if necessary, locks it (base/folder_lock.h), and removes unfinished checkpoints.
  RunFolder(std::filesystem::path folder, std::vector<RunFile> files, Note note);

  /// Writes all files.
  void write_files() const;

  /// If the folder or files in it were removed: creates and locks it again, rewrites the files, calls `note`,
  /// and returns true. Failed writes are retried by the next call. Throws InputError if another process has
  /// locked a folder of this name meanwhile.
  bool restore();

  /// Why removed files could not be rewritten; "" if none is missing.
  const std::string& failure() const { return failure_; }

 private:
  std::filesystem::path folder_;
  std::vector<RunFile> files_;
  Note note_;
  std::optional<FolderLock> lock_;
  std::string failure_;
};

}  // namespace espalier
