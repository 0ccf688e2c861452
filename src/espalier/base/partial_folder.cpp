// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/partial_folder.h"

#include <system_error>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/temporaries.h"

namespace espalier {

namespace fs = std::filesystem;

PartialFolder::PartialFolder(const fs::path& final_path)
    : final_path_(fs::absolute(final_path).lexically_normal()) {
  if (final_path_.filename().empty()) final_path_ = final_path_.parent_path();  // "DIR/"
  const fs::path parent = final_path_.parent_path();
  std::error_code error;
  fs::create_directories(parent, error);
  ESPALIER_CHECK(!error, "cannot make {}: {}", parent.string(), error.message());
  path_ = parent / fmt::format(".{}.{}.partial", final_path_.filename().string(), process_tag());
  fs::remove_all(path_);
}

PartialFolder::~PartialFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

void PartialFolder::commit() {
  sync_folder(path_);
  std::error_code error;
  const bool is_free = !fs::exists(final_path_, error) ||
                       (fs::is_directory(final_path_, error) && fs::is_empty(final_path_, error));
  ESPALIER_CHECK(is_free, "{}: expected no such folder, it exists already", final_path_.string());
  fs::rename(path_, final_path_, error);
  ESPALIER_CHECK(!error, "cannot rename {} to {}: {}", path_.string(), final_path_.string(), error.message());
  path_.clear();
  sync_folder(final_path_.parent_path());
}

}  // namespace espalier
