// SPDX-License-Identifier: Apache-2.0
// Trajectories from JSON Lines.
#pragma once

#include <filesystem>

#include "espalier/data/reader.h"

namespace espalier {

/// As read_trajectories, for a file that holds JSONL (plain, gzip or zstd) whatever its name. Null stands for
/// a field that the row lacks. Fields that are not part of the format are ignored.
Trajectories read_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report);

}  // namespace espalier
