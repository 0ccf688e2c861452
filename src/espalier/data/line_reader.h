// SPDX-License-Identifier: Apache-2.0
// Reads lines of a plain, gzip or zstd file in bounded memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

/// A stream of decompressed bytes.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Fills `out` (not empty) from its front; returns the number of bytes, 0 only at the end. Throws
  /// InputError (path and reason) if the file cannot be read or is corrupt or truncated.
  virtual size_t read(std::span<char> out) = 0;
  /// The fraction of the file that has been read, in [0, 1].
  virtual double fraction() const = 0;
};

/// Opens `path`: gzip or zstd by magic number, otherwise plain. Consecutive compressed members are
/// concatenated.
std::unique_ptr<ByteSource> open_source(const std::filesystem::path& path);

/// Splits a source into lines. Memory: about twice the longest line, at most twice the limit.
class LineReader {
 public:
  /// Readable bytes of arbitrary value after each line, which simdjson requires.
  static constexpr size_t kPadding = 64;

  /// A line longer than max_line_bytes is skipped if it ends within max_passed_over more bytes. Otherwise it
  /// throws InputError, because it may never end (a device, or a decompression bomb).
  LineReader(const std::filesystem::path& path, int64_t max_line_bytes,
             int64_t max_passed_over = int64_t{1} << 34);

  enum class Status { kLine, kTooLong, kEnd };
  /// The next line without its line ending (LF or CRLF) and byte order mark, valid until the next call. A
  /// line above the limit is skipped: the result is kTooLong, and `line` is empty.
  Status next(std::string_view& line);
  /// Called whenever more of the file has been read, also within a line. May be empty.
  std::function<void()> on_read;

  int64_t line_number() const { return line_number_; }  ///< of the last line, from 1
  double fraction() const { return source_->fraction(); }
  int64_t bytes_read() const { return bytes_read_; }  ///< decompressed bytes

 private:
  bool fill();
  Status give(std::string_view text, std::string_view& line);

  std::string name_;
  std::unique_ptr<ByteSource> source_;
  size_t max_line_bytes_;
  size_t max_passed_over_;
  int64_t bytes_read_ = 0;
  std::vector<char> buffer_;
  size_t begin_ = 0;    // of the current line
  size_t scanned_ = 0;  // no line ends in [begin_, scanned_)
  size_t end_ = 0;      // of the bytes read
  int64_t line_number_ = 0;
};

}  // namespace espalier
