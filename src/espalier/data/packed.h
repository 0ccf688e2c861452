// SPDX-License-Identifier: Apache-2.0
// The packed form: trajectories in one memory-mapped safetensors file, a tensor per column.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "espalier/data/reader.h"

namespace espalier {

/// Like read_trajectories, for a packed file. Columns are views of the mapping, which they keep alive. A
/// column whose data is not aligned for its type is copied; if bad rows are dropped, all columns are. The
/// fault of a row reads "FILE: row N: ..." (from 0). Faults of whole columns (types, lengths, offsets that do
/// not ascend from 0 to their end) always throw. Tensors of other names are ignored.
Trajectories read_packed(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report);

/// The texts of all rows, one after the other: row r has [offsets[r], offsets[r + 1]).
struct PackedTexts {
  std::string name;
  Column<uint8_t> bytes;
  Column<int64_t> offsets;  // [R + 1]
};

struct PackedOptions {
  std::map<std::string, std::string> metadata{};
  std::vector<PackedTexts> texts{};  // that are not in the Trajectories
  bool keeps_doubles = false;        // F64 whatever the values are
};

/// Writes the packed form atomically. Real columns become F32 if that holds every value exactly, else F64;
/// doubles that are mapped stay F64.
void write_packed(const std::filesystem::path& path, const Trajectories& trajectories,
                  const PackedOptions& options = {});

/// Checks columns that are not from a file like those of a packed file: lengths, offsets that ascend from 0
/// to the number of tokens, and values. Throws InputError "COLUMN: ..." or "row N: ...".
void check_columns(const Trajectories& columns);

/// The safetensors name of an element type of packed files.
template <typename T>
constexpr const char* dtype_of() {
  if constexpr (std::is_same_v<T, uint8_t>) return "U8";
  if constexpr (std::is_same_v<T, int32_t>) return "I32";
  if constexpr (std::is_same_v<T, int64_t>) return "I64";
  if constexpr (std::is_same_v<T, float>) return "F32";
  if constexpr (std::is_same_v<T, double>) return "F64";
}

}  // namespace espalier
