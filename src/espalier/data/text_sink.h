// SPDX-License-Identifier: Apache-2.0
// Writes text into a file, compressed as the file's name says.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

namespace espalier {

/// Takes text in parts. The file appears (AtomicFile) with commit(). Without commit(), no file is left.
class TextSink {
 public:
  virtual ~TextSink() = default;
  virtual void write(std::string_view text) = 0;
  virtual void commit() = 0;
};

/// Compresses with gzip for .gz and zstd for .zst; other names are plain text. The same text always gives the
/// same bytes.
std::unique_ptr<TextSink> open_sink(const std::filesystem::path& path);

}  // namespace espalier
