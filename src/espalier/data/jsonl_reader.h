// SPDX-License-Identifier: Apache-2.0
// Trajectories from JSON Lines.
#pragma once

#include <filesystem>

#include "espalier/data/reader.h"

namespace espalier {

/// Like read_trajectories, for a file that holds JSONL (plain, gzip or zstd), whatever its name. A field that
/// is null counts as absent. Fields that are not part of the format are ignored.
Trajectories read_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report);

}  // namespace espalier
