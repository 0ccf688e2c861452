// SPDX-License-Identifier: Apache-2.0
// Writing trajectories, and text that may be compressed.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "espalier/data/trajectories.h"

namespace espalier {

/// Writes JSONL, compressed if the name ends in .gz or .zst, or packed safetensors if it ends in
/// .safetensors. Atomic. Values round-trip exactly (packed: F32 if every value of the column is a float,
/// otherwise F64).
void write_trajectories(const std::filesystem::path& path, const Trajectories& trajectories);

/// Takes text in parts. commit() makes the file appear (AtomicFile); without it no file is left.
class TextSink {
 public:
  virtual ~TextSink() = default;
  virtual void write(std::string_view text) = 0;
  virtual void commit() = 0;
};

/// Compresses with gzip for .gz and zstd for .zst; other files are plain text. Equal text gives equal bytes.
std::unique_ptr<TextSink> open_sink(const std::filesystem::path& path);

}  // namespace espalier
