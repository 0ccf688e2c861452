// SPDX-License-Identifier: Apache-2.0
// Writes text to a file, compressed if its name ends in .gz or .zst.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

namespace espalier {

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
