// SPDX-License-Identifier: Apache-2.0
// Files: memory-mapped reading, writing that never leaves a partial file under the final name, and logs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/temporaries.h"

namespace espalier {

class GuardedRange;

/// A read-only mapping of a whole file. Throws InputError (path and reason) if it cannot be opened or is a
/// pipe or device. base/mapped_file_guard.h guards it against truncation: call check_whole() before using
/// results computed from it.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }
  /// Throws InputError if the file was truncated since it was opened, or could not be read.
  void check_whole() const;
  /// Releases the pages from this process. The page cache still serves later reads.
  void release() const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  int descriptor_ = -1;
  std::unique_ptr<GuardedRange> guard_;
};

/// Writes to a temporary file beside `path`; commit() makes it durable (fsync of file and folder) and renames
/// it to `path`. Without commit() the destructor, or a signal handler (base/temporaries.h), removes the
/// temporary file and `path` stays unchanged. Temporary files that killed processes left in the folder are
/// removed too. Failures (including disk full and `ulimit -f`) throw InputError with path and reason.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  void commit();

  /// The file that is written until commit(), for reading what has been written.
  const std::filesystem::path& temporary() const { return temporary_; }

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  std::unique_ptr<RegisteredTemporary> registered_;
  int descriptor_ = -1;
};

/// The system's message for the errno `error`. For EFBIG it includes the limit.
std::string system_message(int error);

/// Read or write a whole small file.
std::string read_text(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, std::string_view text);

/// fsyncs every regular file directly in `folder`, then the folder itself.
void sync_folder(const std::filesystem::path& folder);

/// Whether `path` still names the file that is open as `descriptor`: false if it was removed or replaced,
/// true if that is unknown.
bool still_names(const std::filesystem::path& path, int descriptor);

/// Throws InputError unless there is nothing at `folder`, or a folder without files.
void check_new_folder(const std::filesystem::path& folder);

/// A folder ".NAME.TAG.partial" (base/temporaries.h: process_tag) beside `final_path`, or in it if that is an
/// empty folder: it may be a mount point, which nothing can replace. The constructor creates the parents of
/// `final_path`, the caller creates the folder. Unless it was committed, the destructor removes all of them
/// that have no other files.
class PartialFolder {
 public:
  explicit PartialFolder(const std::filesystem::path& final_path);
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Syncs the files and gives them their final names. check_new_folder must pass.
  void commit();

 private:
  std::filesystem::path path_, final_path_;
  std::vector<std::filesystem::path> made_;  // parents that did not exist, the innermost first
  bool is_inside_ = false;
};

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
