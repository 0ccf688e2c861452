// SPDX-License-Identifier: Apache-2.0
// Lines of a file that is plain text, gzip or zstd, in bounded memory.
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

/// A stream of plain bytes. The first bytes of the file tell how it is decompressed.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Fills `out` (not empty) from its front; returns the bytes given, 0 at the end only. Throws InputError
  /// (path and reason) where the file cannot be read or is corrupt or truncated.
  virtual size_t read(std::span<char> out) = 0;
  /// The part of the file that has been read, in [0, 1].
  virtual double fraction() const = 0;
};

/// Opens `path`: gzip or zstd by magic number, else as it is. Several compressed members in a row are one
/// text.
std::unique_ptr<ByteSource> open_source(const std::filesystem::path& path);

/// Splits a source into lines. Memory: about twice the longest line, never more than twice the limit.
class LineReader {
 public:
  /// The bytes after a line that may be read (their values mean nothing), as simdjson wants.
  static constexpr size_t kPadding = 64;

  /// A line of more than max_line_bytes is skipped if it ends within max_passed_over more bytes. A longer one
  /// throws InputError, because it may never end (a device, or a few kilobytes that decompress to terabytes).
  LineReader(const std::filesystem::path& path, int64_t max_line_bytes,
             int64_t max_passed_over = int64_t{1} << 34);

  enum class Status { kLine, kTooLong, kEnd };
  /// The next line without its end (LF or CRLF) and without a byte order mark, valid until the next call. A
  /// line above the limit is skipped: the result is kTooLong, and `line` is empty.
  Status next(std::string_view& line);
  /// Called whenever more of the file has been read, also inside of a line. May be empty.
  std::function<void()> on_read;

  int64_t line_number() const { return line_number_; }  ///< of the last line given, from 1
  double fraction() const { return source_->fraction(); }
  int64_t bytes_read() const { return bytes_read_; }  ///< of text

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
