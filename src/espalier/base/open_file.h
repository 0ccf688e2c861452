// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

namespace espalier {

/// Whether `path` still names the file that is open as `descriptor`: false if it was removed or replaced,
/// true if that is unknown.
bool still_names(const std::filesystem::path& path, int descriptor);

}  // namespace espalier
