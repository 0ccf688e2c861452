// SPDX-License-Identifier: Apache-2.0
// The folder of a run, which somebody may remove while the run goes on.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/folder_lock.h"

namespace espalier {

/// A text that a run keeps in its folder, beside its checkpoints.
struct RunFile {
  std::string name, text;
};

class RunFolder {
 public:
  using Note = std::function<void(const std::string&)>;

  /// Makes the folder if absent, locks it (base/folder_lock.h), and removes checkpoints that are not
  /// finished.
  RunFolder(std::filesystem::path folder, std::vector<RunFile> files, Note note);

  /// Writes all files.
  void write_files() const;

  /// Where the folder or files in it were removed: makes and locks it again, writes the files again, and
  /// tells `note`. Returns whether that was so. What cannot be written is tried again by the next call.
  /// Throws InputError where another process has a folder of this name now, in which nothing must be written.
  bool restore();

  /// Why files that were removed are not there again; "" where none is missing.
  const std::string& failure() const { return failure_; }

 private:
  std::filesystem::path folder_;
  std::vector<RunFile> files_;
  Note note_;
  std::optional<FolderLock> lock_;
  std::string failure_;
};

}  // namespace espalier
