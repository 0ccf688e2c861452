// SPDX-License-Identifier: Apache-2.0
// Log files. A failure to write one never stops the work that it logs.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <string>

namespace espalier {

/// Appends records to a file. Records that cannot be written (disk full, no permission, ulimit -f) are
/// queued, up to 16 MiB, and retried with the next record. Beyond that new records are dropped. Records in
/// the file are always complete, except the last one while writing fails.
class LogFile {
 public:
  explicit LogFile(const std::filesystem::path& path) : path_(path) {}
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  /// Opens or creates the file if it is not open yet. Throws only if memory runs out.
  void append(std::string record);
  /// If the file was removed or replaced, closes it and returns true. The next record goes to the file that
  /// then has the path.
  bool close_if_removed();

  const std::filesystem::path& path() const { return path_; }
  /// The reason why the last write failed, or "" if everything is written.
  const std::string& failure() const { return failure_; }
  /// Records that are not completely in the file.
  int64_t num_missing() const { return num_dropped_ + static_cast<int64_t>(waiting_.size()); }

 private:
  bool write_front();  // false on failure

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::deque<std::string> waiting_;
  size_t front_written_ = 0;  // bytes of the first waiting record that are in the file
  size_t waiting_bytes_ = 0;
  int64_t num_dropped_ = 0;
  std::string failure_;
};

}  // namespace espalier
