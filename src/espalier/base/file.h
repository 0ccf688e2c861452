// SPDX-License-Identifier: Apache-2.0
// Files: memory-mapped reading, and writing that never leaves a partial file under the final name.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

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

}  // namespace espalier
