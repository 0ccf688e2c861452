// SPDX-License-Identifier: Apache-2.0
// Writing trajectories.
#pragma once

#include <filesystem>

#include "espalier/data/trajectories.h"

namespace espalier {

/// JSONL, or packed safetensors when the name ends in .safetensors; compressed when the name ends in .gz or
/// .zst. Atomic. Reading the file back gives equal values: reals are written so that they round-trip (packed:
/// F32 where every value of the column is a float, F64 otherwise).
void write_trajectories(const std::filesystem::path& path, const Trajectories& trajectories);

}  // namespace espalier
