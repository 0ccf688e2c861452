// SPDX-License-Identifier: Apache-2.0
// Folders that appear under their final name only when they are complete.
#pragma once

#include <filesystem>
#include <string>

namespace espalier {

/// A folder ".NAME.TAG.partial" (base/temporaries.h: process_tag) beside `final_path` that the destructor
/// removes unless it was committed. The constructor creates the parent of `final_path`; the caller creates
/// the folder itself.
class PartialFolder {
 public:
  explicit PartialFolder(const std::filesystem::path& final_path);
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Syncs the files and renames the folder to its final name. Replaces an empty folder of that name; throws
  /// InputError if anything else has it.
  void commit();

 private:
  std::filesystem::path path_, final_path_;
};

}  // namespace espalier
