// SPDX-License-Identifier: Apache-2.0
// The index: rows that are larger than memory, parsed once into a packed file that is mapped.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/hash.h"
#include "espalier/base/option_names.h"
#include "espalier/base/safetensors.h"
#include "espalier/base/units.h"
#include "espalier/data/packed.h"
#include "espalier/data/reader.h"

namespace espalier {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(IgnoredField, name, rows, per_token_rows)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FieldTally, tokens, loss_tokens, rows_without_mask, rows, number_rows,
                                   ignored, more_ignored)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ReadReport, rows_read, rows_skipped, first_errors, fields)

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Raised when other rows are made of the same file.
constexpr int kVersion = 1;
constexpr const char *kKey = "espalier.index.key", *kReport = "espalier.index.report";

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);  // names of files may be any bytes
}

/// What decides which rows the files give; "" if one is standard input or no regular file.
std::string key_of(std::span<const fs::path> paths, const ReadOptions& options) {
  json files = json::array();
  for (const fs::path& path : paths) {
    struct stat status{};
    if (path == "/dev/stdin" || ::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return "";
    const auto time = [](const timespec& t) { return json{t.tv_sec, t.tv_nsec}; };
    // Messages of bad rows name the file as it was given. The time of change is set by the kernel alone.
    files.push_back({options.skip_bad_rows ? path.string() : path.filename().string(), status.st_size,
                     status.st_ino, time(status.st_mtim), time(status.st_ctim)});
  }
  return dump({kVersion, kNumFieldNames, options.vocab_size, options.skip_bad_rows, options.max_rows,
               options.max_line_bytes, files});
}

fs::path path_of(std::span<const fs::path> paths, const fs::path& folder) {
  const fs::path& first = paths.front();
  std::string name = fmt::format(".{}", first.filename().string());
  if (paths.size() > 1) name += fmt::format("+{}", paths.size() - 1);
  if (!folder.empty()) {  // files of several folders may have the same name
    Hasher hasher;
    hasher.add(std::as_bytes(std::span(fs::absolute(first).lexically_normal().native())));
    name += fmt::format("-{}", hasher.digits().substr(0, 8));
  }
  return (folder.empty() ? first.parent_path() : folder) / (name + ".espalier-index.safetensors");
}

/// Thrown while rows are read: another process has written their index.
struct IndexFound {
  Trajectories rows;
};

class RowIndex {
 public:
  RowIndex(std::span<const fs::path> paths, const ReadOptions& options, ReadReport* report)
      : paths_(paths),
        options_(options),
        report_(*report),
        path_(path_of(paths, options.row_cache)),
        key_(key_of(paths, options)) {}
  ~RowIndex() { unlock(); }
  RowIndex(const RowIndex&) = delete;
  RowIndex& operator=(const RowIndex&) = delete;

  Trajectories read() {
    ReadOptions options = options_;
    options.store = {};
    if (key_.empty()) return read_files(paths_, options, &report_);
    if (std::optional<Trajectories> rows = open()) return std::move(*rows);
    options.store = {.memory = options_.store.memory, .begin = [this] { return begin(); }};
    try {
      return keep(read_files(paths_, options, &report_));
    } catch (IndexFound& found) {
      return std::move(found.rows);
    }
  }

 private:
  /// The rows of the index, if it is there, whole and of these files and options. Sets the report.
  std::optional<Trajectories> open() {
    std::error_code error;
    if (!fs::exists(path_, error)) return std::nullopt;
    try {
      auto metadata = SafetensorsFile(path_).metadata();
      if (metadata[kKey] != key_) return std::nullopt;
      const json kept = json::parse(metadata[kReport]);
      Trajectories rows =
          read_packed(path_, {.vocab_size = options_.vocab_size, .progress = options_.progress}, nullptr);
      for (size_t i = 0; i < kept.at(1).size(); ++i)
        rows.sources.push_back({paths_[i].string(), kept.at(1).at(i)});
      report_ = kept.at(0);
      return rows;
    } catch (const InputError&) {
      return std::nullopt;  // damaged: it is written again
    } catch (const json::exception&) {
      return std::nullopt;
    }
  }

  /// RowStore::begin. Throws IndexFound.
  fs::path begin() {
    if (descriptor_ >= 0) return path_;  // files of which rows are left out have another builder
    std::error_code ignored;
    if (!options_.row_cache.empty()) fs::create_directories(options_.row_cache, ignored);
    descriptor_ = ::open(lock_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor_ < 0) {
      note(fmt::format(
          "warning: {}: rows that take more than {} stay in memory, because {} cannot be written: {}; give "
          "{}",
          paths_.front().string(), memory(), path_.string(), system_message(errno),
          named("row-cache", "DIR")));
      return {};
    }
    // Where a file system has no locks, several processes may write; the last one wins.
    while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
      if (options_.progress) options_.progress(0);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    // NOLINTNEXTLINE(bugprone-std-exception-baseclass): nothing that reads rows takes it for an error
    if (std::optional<Trajectories> rows = open()) throw IndexFound{std::move(*rows)};
    return path_;
  }

  /// Writes the index of rows in temporary files, and maps it. Returns the rows as they are if they are in
  /// memory, or if a file was changed while it was read.
  Trajectories keep(Trajectories rows) {
    if (descriptor_ < 0 || key_of(paths_, options_) != key_) return rows;
    json first_rows = json::array();
    for (const RowSource& source : rows.sources) first_rows.push_back(source.first_row);
    write_packed(path_, rows, {.metadata = {{kKey, key_}, {kReport, dump({report_, first_rows})}}});
    unlock();
    note(
        fmt::format("note: {}: rows that take more than {} were written to {} ({}), which is mapped from now "
                    "on; {} keeps them in memory",
                    paths_.front().string(), memory(), path_.string(),
                    human_bytes(static_cast<double>(fs::file_size(path_))), named("row-cache", "off")));
    std::optional<Trajectories> mapped = open();
    return mapped ? std::move(*mapped) : std::move(rows);
  }

  fs::path lock_path() const { return path_.string() + ".lock"; }
  std::string memory() const { return human_bytes(static_cast<double>(options_.store.memory)); }
  void note(const std::string& text) const {
    if (options_.note) options_.note(text);
  }
  void unlock() {
    if (descriptor_ < 0) return;
    ::unlink(lock_path().c_str());
    ::close(std::exchange(descriptor_, -1));
  }

  std::span<const fs::path> paths_;
  const ReadOptions& options_;
  ReadReport& report_;
  fs::path path_;
  std::string key_;
  int descriptor_ = -1;  // of the lock
};

}  // namespace

Trajectories read_trajectories(std::span<const fs::path> paths, const ReadOptions& options,
                               ReadReport* report) {
  ESPALIER_CHECK(!paths.empty(), "expected at least one file of trajectories, received none");
  if (options.store.memory == 0) return read_files(paths, options, report);
  ReadReport own;
  return RowIndex(paths, options, report == nullptr ? &own : report).read();
}

}  // namespace espalier
