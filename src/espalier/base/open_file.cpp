// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/open_file.h"

#include <sys/stat.h>

#include <cerrno>

namespace espalier {

bool still_names(const std::filesystem::path& path, int descriptor) {
  struct stat named{}, open{};
  if (::stat(path.c_str(), &named) != 0) return errno != ENOENT && errno != ENOTDIR;
  return ::fstat(descriptor, &open) != 0 || (named.st_dev == open.st_dev && named.st_ino == open.st_ino);
}

}  // namespace espalier
