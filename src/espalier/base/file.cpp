// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <set>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/temporaries.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void throw_errno(const char* action, const fs::path& path, int error) {
  throw InputError(fmt::format("cannot {} {}: {}", action, path.string(), system_message(error)));
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

int open_for_reading(const fs::path& path, int more_flags = 0) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | more_flags);
  if (descriptor < 0) throw_errno("open", path, errno);
  return descriptor;
}

struct stat status_of(int descriptor, const fs::path& path) {
  struct stat status;
  if (::fstat(descriptor, &status) != 0) throw_errno("inspect", path, errno);
  ESPALIER_CHECK(!S_ISDIR(status.st_mode), "cannot read {}: expected a file, received a folder",
                 path.string());
  return status;
}

void sync_path(const fs::path& path, bool is_folder) {
  const Descriptor descriptor(open_for_reading(path));
  // Some network file systems cannot sync a folder and return EINVAL.
  if (::fsync(descriptor.get()) != 0 && !(is_folder && errno == EINVAL)) throw_errno("sync", path, errno);
}

fs::path folder_of(const fs::path& path) {
  const fs::path parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

// Removes temporary files of killed processes, the first time that this process writes to the folder, or
// again after many others: each checkpoint is a new one, which a long run must not remember.
void sweep_once(const fs::path& folder) {
  static std::mutex mutex;
  static std::set<fs::path> swept;
  std::error_code error;
  const fs::path absolute = fs::absolute(folder, error);
  const std::lock_guard lock(mutex);
  if (swept.size() >= 64) swept.clear();
  if (!error && swept.insert(absolute).second) sweep_temporaries(absolute);
}

void check_is_free(bool is_free, const fs::path& folder) {
  ESPALIER_CHECK(is_free, "{}: expected a new or empty folder, received one with files in it",
                 folder.string());
}

constexpr size_t kMaxWaitingBytes = size_t{16} << 20;

}  // namespace

std::string system_message(int error) {
  std::string text = std::generic_category().message(error);
  rlimit limit{};
  if (error == EFBIG && ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    text += fmt::format(" (the limit of this process, ulimit -f, is {} bytes)", limit.rlim_cur);
  return text;
}

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  // Opening a pipe would wait for a writer.
  Descriptor descriptor(open_for_reading(path, O_NONBLOCK));
  const struct stat status = status_of(descriptor.get(), path);
  ESPALIER_CHECK(S_ISREG(status.st_mode), "cannot map {}: expected a regular file, received a pipe or device",
                 path.string());
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) return;  // mmap refuses empty ranges
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (address == MAP_FAILED) throw_errno("map", path, errno);
  data_ = static_cast<const std::byte*>(address);
  descriptor_ = descriptor.release();
  guard_ = std::make_unique<GuardedRange>(data_, size_, path.string(), descriptor_);
}

void MappedFile::check_whole() const {
  if (guard_) guard_->check();
}

void MappedFile::release() const {
  // Only advice to the kernel, so a failure is ignored.
  if (data_ != nullptr) ::madvise(const_cast<std::byte*>(data_), size_, MADV_DONTNEED);
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  guard_.reset();
  ::munmap(const_cast<std::byte*>(data_), size_);
  ::close(descriptor_);
}

AtomicFile::AtomicFile(const fs::path& path) : path_(path) {
  std::error_code ignored;
  ESPALIER_CHECK(!path.filename().empty(), "cannot write `{}`: expected the name of a file", path.string());
  // A symbolic link stays; the file that it points to is replaced.
  if (fs::is_symlink(path, ignored)) path_ = fs::weakly_canonical(path);
  const fs::file_status status = fs::status(path_, ignored);
  ESPALIER_CHECK(!fs::exists(status) || fs::is_regular_file(status),
                 "cannot write {}: expected a regular file, received a folder, pipe or device",
                 path.string());
  sweep_once(folder_of(path_));
  static std::atomic<uint64_t> counter{0};
  do {
    temporary_ = folder_of(path_) / temporary_name(counter.fetch_add(1));
    registered_ = std::make_unique<RegisteredTemporary>(temporary_);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) throw_errno("write", path_, errno);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  ESPALIER_ASSERT(descriptor_ >= 0);
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_errno("write", path_, errno);
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::write(std::string_view text) {
  write(std::as_bytes(std::span(text.data(), text.size())));
}

void AtomicFile::commit() {
  ESPALIER_ASSERT(descriptor_ >= 0);
  if (::fsync(descriptor_) != 0) throw_errno("sync", path_, errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) throw_errno("close", path_, errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw_errno("rename a file to", path_, errno);
  temporary_.clear();
  registered_.reset();
  sync_path(folder_of(path_), true);
}

std::string read_text(const fs::path& path) {
  const Descriptor descriptor(open_for_reading(path));
  const struct stat status = status_of(descriptor.get(), path);
  std::string text;
  size_t used = 0;
  while (true) {
    // The size of pipes and files of /proc is not known beforehand.
    if (used == text.size())
      text.resize(used + std::max<size_t>(static_cast<size_t>(status.st_size) + 1, 4096));
    const ssize_t count = ::read(descriptor.get(), text.data() + used, text.size() - used);
    if (count < 0) {
      if (errno == EINTR) continue;
      throw_errno("read", path, errno);
    }
    if (count == 0) break;
    used += static_cast<size_t>(count);
  }
  text.resize(used);
  return text;
}

void write_text(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

void sync_folder(const fs::path& folder) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  ESPALIER_CHECK(!error, "cannot list {}: {}", folder.string(), error.message());
  for (const fs::directory_entry& entry : entries) {
    if (fs::is_regular_file(entry.symlink_status())) sync_path(entry.path(), false);
  }
  sync_path(folder, true);
}

bool still_names(const std::filesystem::path& path, int descriptor) {
  struct stat named{}, open{};
  if (::stat(path.c_str(), &named) != 0) return errno != ENOENT && errno != ENOTDIR;
  return ::fstat(descriptor, &open) != 0 || (named.st_dev == open.st_dev && named.st_ino == open.st_ino);
}

void check_new_folder(const fs::path& folder) {
  std::error_code error;
  const bool is_free =
      !fs::exists(folder, error) || (fs::is_directory(folder, error) && fs::is_empty(folder, error));
  check_is_free(is_free, folder);
}

PartialFolder::PartialFolder(const fs::path& final_path)
    : final_path_(fs::absolute(final_path).lexically_normal()) {
  if (final_path_.filename().empty()) final_path_ = final_path_.parent_path();  // "DIR/"
  const fs::path parent = final_path_.parent_path();
  std::error_code error;
  for (fs::path folder = parent; !fs::exists(folder, error) && !error; folder = folder.parent_path()) {
    made_.push_back(folder);
  }
  fs::create_directories(parent, error);
  ESPALIER_CHECK(!error, "cannot make {}: {}", parent.string(), error.message());
  is_inside_ = fs::is_directory(final_path_, error) && fs::is_empty(final_path_, error);
  path_ = (is_inside_ ? final_path_ : parent) /
          fmt::format(".{}.{}.partial", final_path_.filename().string(), process_tag());
  fs::remove_all(path_);
}

PartialFolder::~PartialFolder() {
  if (path_.empty()) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  for (const fs::path& folder : made_) fs::remove(folder, ignored);  // those without other files
}

void PartialFolder::commit() {
  sync_folder(path_);
  std::error_code error;
  if (is_inside_) {
    std::vector<fs::path> written;
    for (const auto& entry : fs::directory_iterator(path_)) written.push_back(entry.path());
    for (const auto& entry : fs::directory_iterator(final_path_)) {
      check_is_free(entry.path() == path_, final_path_);
    }
    for (size_t i = 0; i < written.size() && !error; ++i) {
      fs::rename(written[i], final_path_ / written[i].filename(), error);
    }
    if (!error) fs::remove(path_, error);
  } else {
    check_new_folder(final_path_);
    fs::rename(path_, final_path_, error);
  }
  ESPALIER_CHECK(!error, "cannot rename {} to {}: {}", path_.string(), final_path_.string(), error.message());
  path_.clear();
  sync_folder(is_inside_ ? final_path_ : final_path_.parent_path());
}

LogFile::~LogFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void LogFile::append(std::string record) {
  if (waiting_bytes_ + record.size() > kMaxWaitingBytes) {
    ++num_dropped_;
  } else {
    waiting_bytes_ += record.size();
    waiting_.push_back(std::move(record));
  }
  while (!waiting_.empty()) {
    if (!write_front()) return;
    waiting_bytes_ -= waiting_.front().size();
    waiting_.pop_front();
    front_written_ = 0;
  }
  failure_.clear();
}

bool LogFile::close_if_removed() {
  if (descriptor_ < 0 || still_names(path_, descriptor_)) return false;
  ::close(std::exchange(descriptor_, -1));
  front_written_ = 0;
  return true;
}

bool LogFile::write_front() {
  if (descriptor_ < 0) {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (descriptor_ < 0) {
      failure_ = system_message(errno);
      return false;
    }
  }
  const std::string& record = waiting_.front();
  while (front_written_ < record.size()) {
    const ssize_t written =
        ::write(descriptor_, record.data() + front_written_, record.size() - front_written_);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      failure_ = system_message(errno);
      return false;
    }
    front_written_ += static_cast<size_t>(written);
  }
  return true;
}

}  // namespace espalier
