// SPDX-License-Identifier: Apache-2.0
// Trajectories in one safetensors file: a tensor per column, mapped.
#pragma once

#include <filesystem>

#include "espalier/data/reader.h"

namespace espalier {

/// As read_trajectories, for a packed file. Columns are views of the mapping, which they keep alive; a column
/// whose data is not aligned for its type is copied, and so is everything when bad rows are dropped. A fault
/// of one row is "FILE: row N: ..." (from 0); a fault of the columns themselves (types, lengths, offsets that
/// do not ascend from 0 to their end) always throws. Tensors with other names are ignored.
Trajectories read_packed(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report);

/// Writes the packed form, atomically. Real columns become F32 where that holds every value, else F64.
void write_packed(const std::filesystem::path& path, const Trajectories& trajectories);

/// Checks columns that did not come from a file by the rules for those of a packed one: lengths, offsets that
/// ascend from 0 to the number of tokens, and values. Throws InputError "COLUMN: ..." or "row N: ...".
void check_columns(const Trajectories& columns);

}  // namespace espalier
