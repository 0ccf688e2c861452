// SPDX-License-Identifier: Apache-2.0
// Folders that are whole under their final name or not there.
#pragma once

#include <filesystem>
#include <string>

namespace espalier {

/// A folder beside `final_path`, ".NAME.TAG.partial" (base/temporaries.h: process_tag), that disappears with
/// everything in it unless it is committed. The parent of `final_path` is made if absent; the folder itself
/// is made by whoever writes into it.
class PartialFolder {
 public:
  explicit PartialFolder(const std::filesystem::path& final_path);
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Makes the files durable and renames the folder to its final name. An empty folder there is replaced.
  /// Throws InputError where there is anything else.
  void commit();

 private:
  std::filesystem::path path_, final_path_;
};

}  // namespace espalier
