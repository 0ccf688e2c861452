// SPDX-License-Identifier: Apache-2.0
// Log files. A failure to write one never stops the work that it reports.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <string>

namespace espalier {

/// Appends records to a file. Records that cannot be written (disk full, no permission, ulimit -f) are kept,
/// up to 16 MiB, and tried again with the next record. Beyond that new records are dropped. Records in the
/// file are always whole, except the last one while a failure lasts.
class LogFile {
 public:
  explicit LogFile(const std::filesystem::path& path) : path_(path) {}
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  /// Throws only if memory runs out. Opens or creates the file if it is not open yet.
  void append(std::string record);
  /// Where somebody has removed the file, or put another one in its place: closes it and returns true. The
  /// next record goes to the file that then has the path.
  bool close_if_removed();

  const std::filesystem::path& path() const { return path_; }
  /// Why the last attempt to write failed, or "" if everything is written.
  const std::string& failure() const { return failure_; }
  /// Records that are not (wholly) in the file.
  int64_t num_missing() const { return num_dropped_ + static_cast<int64_t>(waiting_.size()); }

 private:
  bool write_front();  // false: it failed

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::deque<std::string> waiting_;
  size_t front_written_ = 0;  // bytes of the first waiting record that the file has
  size_t waiting_bytes_ = 0;
  int64_t num_dropped_ = 0;
  std::string failure_;
};

}  // namespace espalier
