// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/run_folder.h"

#include <fmt/ranges.h>

#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/train/run/checkpoint.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  ESPALIER_CHECK(!error, "cannot make {}: {}", folder.string(), error.message());
}

bool is_missing(const fs::path& path) {
  std::error_code unknown;
  return fs::status(path, unknown).type() == fs::file_type::not_found;
}

}  // namespace

RunFolder::RunFolder(fs::path folder, std::vector<RunFile> files, Note note)
    : folder_(std::move(folder)), files_(std::move(files)), note_(std::move(note)) {
  make_folder(folder_);
  lock_.emplace(folder_, note_);
  sweep_unfinished_checkpoints(folder_, lock_->held());
}

void RunFolder::write_files() const {
  for (const RunFile& file : files_) write_text(folder_ / file.name, file.text);
}

bool RunFolder::restore() {
  std::vector<const RunFile*> missing;
  std::vector<std::string> names;
  const bool has_lock = lock_ && lock_->is_in_place();
  if (!has_lock) names.emplace_back(".lock");
  for (const RunFile& file : files_) {
    if (!is_missing(folder_ / file.name)) continue;
    missing.push_back(&file);
    names.push_back(file.name);
  }
  if (names.empty()) {
    failure_.clear();
    return false;
  }
  const bool is_new = failure_.empty();
  if (is_new && note_) {
    note_(fmt::format(
        "warning: {} or files in it were removed during the run: {}. Files that the run needs are rewritten; "
        "removed metrics, checkpoints and other files are lost",
        folder_.string(), fmt::join(names, ", ")));
  }
  try {
    make_folder(folder_);
    if (!has_lock) {
      lock_.reset();
      lock_.emplace(folder_, Note());
    }
    for (const RunFile* file : missing) write_text(folder_ / file->name, file->text);
    failure_.clear();
  } catch (const InputError& error) {
    if (!has_lock && !lock_ && !is_missing(folder_ / ".lock")) throw;
    failure_ = error.what();
    if (is_new && note_)
      note_(fmt::format("warning: {}; the run continues and retries after every step", failure_));
  }
  return true;
}

}  // namespace espalier
