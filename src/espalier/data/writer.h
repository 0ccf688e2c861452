// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "espalier/data/trajectories.h"

namespace espalier {

/// Writes JSONL, compressed if the name ends in .gz or .zst, or packed safetensors if it ends in
/// .safetensors. Atomic. Values round-trip exactly (packed: F32 if every value of the column is a float,
/// otherwise F64).
void write_trajectories(const std::filesystem::path& path, const Trajectories& trajectories);

}  // namespace espalier
