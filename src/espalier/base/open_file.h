// SPDX-License-Identifier: Apache-2.0
// Files that are open while others may remove them.
#pragma once

#include <filesystem>

namespace espalier {

/// Whether `path` still names the file that is open as `descriptor`: false where it was removed, or another
/// file is in its place; true where that cannot be told.
bool still_names(const std::filesystem::path& path, int descriptor);

}  // namespace espalier
