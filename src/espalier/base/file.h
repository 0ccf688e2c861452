// Files: mapped reading and writing that never leaves a half-written file under its final name.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace espalier {

/// A read-only mapping of a whole file. Throws InputError (path and reason) when it cannot be opened.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Writes to a temporary file beside `path`; commit() makes it durable (fsync of file and folder) and renames
/// it to `path`. Without commit() the destructor removes the temporary and `path` stays as it was.
/// Every failing call throws InputError with path and reason (disk full included).
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
  int descriptor_ = -1;
};

/// Whole small files.
std::string read_text(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, std::string_view text);

/// fsyncs every regular file directly in `folder`, then the folder itself.
void sync_folder(const std::filesystem::path& folder);

}  // namespace espalier
