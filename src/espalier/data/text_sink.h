// Text into a file, compressed as its name says.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

namespace espalier {

/// Takes text in pieces. The file appears (AtomicFile) with commit(); without it, nothing is left.
class TextSink {
 public:
  virtual ~TextSink() = default;
  virtual void write(std::string_view text) = 0;
  virtual void commit() = 0;
};

/// gzip for .gz, zstd for .zst, else plain. The same text gives the same bytes.
std::unique_ptr<TextSink> open_sink(const std::filesystem::path& path);

}  // namespace espalier
