// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/line_reader.h"

#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "espalier/base/check.h"

namespace espalier {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 18;
constexpr int kZstdWindowLog = 30;  // of `zstd --long=30`: 1 GiB that a frame may ask for

/// A file read block by block.
class BlockFile {
 public:
  explicit BlockFile(const std::filesystem::path& path)
      : name_(path.string()), file_(std::fopen(path.c_str(), "rb")) {
    ESPALIER_CHECK(file_ != nullptr, "cannot open {}: {}", name_, std::generic_category().message(errno));
    std::error_code unknown;
    const uintmax_t size = std::filesystem::file_size(path, unknown);
    size_ = unknown ? 0 : static_cast<double>(size);
  }

  /// Reads the next block if the last is consumed; false at the end of the file.
  bool refill() {
    if (!rest_.empty()) return true;
    block_.resize(kBlockBytes);
    const size_t count = std::fread(block_.data(), 1, block_.size(), file_.get());
    ESPALIER_CHECK(count > 0 || !std::ferror(file_.get()), "cannot read {}: {}", name_,
                   std::generic_category().message(errno));
    bytes_read_ += static_cast<double>(count);
    rest_ = std::string_view(block_.data(), count);
    return count > 0;
  }

  std::string_view rest() const { return rest_; }
  void consume(size_t count) { rest_.remove_prefix(count); }
  const std::string& name() const { return name_; }
  double fraction() const { return size_ > 0 ? std::min(1.0, bytes_read_ / size_) : 0.0; }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  std::string name_;
  std::unique_ptr<std::FILE, Close> file_;
  std::vector<char> block_;
  std::string_view rest_;
  double size_ = 0;
  double bytes_read_ = 0;
};

class FileSource : public ByteSource {
 public:
  explicit FileSource(std::unique_ptr<BlockFile> file) : file_(std::move(file)) {}
  double fraction() const override { return file_->fraction(); }

 protected:
  BlockFile& file() { return *file_; }

  [[noreturn]] void throw_corrupt(const char* format, const char* reason) const {
    throw InputError(
        fmt::format("{}: cannot decompress: the {} data is corrupt ({})", file_->name(), format, reason));
  }
  [[noreturn]] void throw_truncated(const char* format) const {
    throw InputError(fmt::format("{}: cannot decompress: the {} data is truncated", file_->name(), format));
  }

 private:
  std::unique_ptr<BlockFile> file_;
};

class PlainSource : public FileSource {
 public:
  using FileSource::FileSource;

  size_t read(std::span<char> out) override {
    if (!file().refill()) return 0;
    const size_t count = std::min(out.size(), file().rest().size());
    std::memcpy(out.data(), file().rest().data(), count);
    file().consume(count);
    return count;
  }
};

class GzipSource : public FileSource {
 public:
  explicit GzipSource(std::unique_ptr<BlockFile> file) : FileSource(std::move(file)) {
    // Window bits: 15, plus 16 to require a gzip header.
    if (::inflateInit2(&stream_, 15 + 16) != Z_OK) throw std::bad_alloc();
  }
  ~GzipSource() override { ::inflateEnd(&stream_); }

  size_t read(std::span<char> out) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(std::min(out.size(), kBlockBytes));
    const uInt wanted = stream_.avail_out;
    while (stream_.avail_out > 0) {
      const bool at_end = !file().refill();
      if (at_end && !inside_member_) break;
      if (!inside_member_) ::inflateReset(&stream_);
      inside_member_ = true;
      step(at_end);
    }
    return wanted - stream_.avail_out;
  }

 private:
  void step(bool at_end) {
    const std::string_view input = file().rest();
    const uInt space = stream_.avail_out;
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(input.data()));
    stream_.avail_in = static_cast<uInt>(input.size());
    const int result = ::inflate(&stream_, Z_NO_FLUSH);
    file().consume(input.size() - stream_.avail_in);
    if (result == Z_STREAM_END) {
      inside_member_ = false;
    } else if (result != Z_OK && result != Z_BUF_ERROR) {
      throw_corrupt("gzip", stream_.msg != nullptr ? stream_.msg : "no reason given");
    } else if (at_end && stream_.avail_out == space) {
      throw_truncated("gzip");
    }
  }

  z_stream stream_{};
  bool inside_member_ = true;
};

class ZstdSource : public FileSource {
 public:
  explicit ZstdSource(std::unique_ptr<BlockFile> file)
      : FileSource(std::move(file)), stream_(::ZSTD_createDStream()) {
    if (!stream_) throw std::bad_alloc();
    ::ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, kZstdWindowLog);
  }

  size_t read(std::span<char> out) override {
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    while (output.pos < output.size) {
      const bool at_end = !file().refill();
      if (at_end && !inside_frame_) break;
      const size_t before = output.pos;
      ZSTD_inBuffer input{file().rest().data(), file().rest().size(), 0};
      const size_t result = ::ZSTD_decompressStream(stream_.get(), &output, &input);
      file().consume(input.pos);
      ESPALIER_CHECK(
          ::ZSTD_getErrorCode(result) != ZSTD_error_frameParameter_windowTooLarge,
          "{}: expected zstd data with a window of at most 1 GiB (--long=30), received a larger one; "
          "try `zstd -d --long=31 {}`",
          file().name(), file().name());
      if (::ZSTD_isError(result)) throw_corrupt("zstd", ::ZSTD_getErrorName(result));
      inside_frame_ = result != 0;
      if (at_end && inside_frame_ && output.pos == before) throw_truncated("zstd");
    }
    return output.pos;
  }

 private:
  struct Free {
    void operator()(ZSTD_DStream* stream) const { ::ZSTD_freeDStream(stream); }
  };

  std::unique_ptr<ZSTD_DStream, Free> stream_;
  bool inside_frame_ = true;
};

bool is_gzip(std::string_view start) {
  return start.starts_with("\x1F\x8B");
}

bool is_zstd(std::string_view start) {
  if (start.starts_with("\x28\xB5\x2F\xFD")) return true;
  // A skippable frame (parallel compressors begin with one): 0x184D2A5?, RFC 8878 section 3.1.2.
  return start.size() >= 4 && (start[0] & 0xF0) == 0x50 && start.substr(1, 3) == "\x2A\x4D\x18";
}

}  // namespace

std::unique_ptr<ByteSource> open_source(const std::filesystem::path& path) {
  auto file = std::make_unique<BlockFile>(path);
  file->refill();
  const std::string_view start = file->rest();
  if (is_gzip(start)) return std::make_unique<GzipSource>(std::move(file));
  if (is_zstd(start)) return std::make_unique<ZstdSource>(std::move(file));
  return std::make_unique<PlainSource>(std::move(file));
}

LineReader::LineReader(const std::filesystem::path& path, int64_t max_line_bytes, int64_t max_passed_over)
    : name_(path.string()),
      source_(open_source(path)),
      max_line_bytes_(static_cast<size_t>(std::max<int64_t>(max_line_bytes, 0))),
      max_passed_over_(static_cast<size_t>(std::max<int64_t>(max_passed_over, 0))) {}

LineReader::Status LineReader::next(std::string_view& line) {
  bool passing_over = false;
  size_t passed_over = 0;
  line = {};
  while (true) {
    const char* start = buffer_.data() + begin_;
    const void* newline =
        end_ > scanned_ ? std::memchr(buffer_.data() + scanned_, '\n', end_ - scanned_) : nullptr;
    if (newline != nullptr) {
      const std::string_view text(start, static_cast<size_t>(static_cast<const char*>(newline) - start));
      begin_ = scanned_ = begin_ + text.size() + 1;
      ++line_number_;
      return passing_over ? Status::kTooLong : give(text, line);
    }
    // One byte more for the CR of a line ending.
    if (end_ - begin_ > (passing_over ? 0 : max_line_bytes_ + 1)) {
      passing_over = true;
      passed_over += end_ - begin_;
      begin_ = end_;
      ESPALIER_CHECK(
          passed_over <= max_line_bytes_ + max_passed_over_,
          "{}:{}: expected a line of at most {} bytes, received a longer one{}", name_, line_number_ + 1,
          max_line_bytes_,
          max_passed_over_ > 0 ? fmt::format(": {} bytes without a line ending", passed_over) : "");
    }
    scanned_ = end_;
    if (fill()) continue;
    if (begin_ == end_ && !passing_over) return Status::kEnd;
    const std::string_view text(buffer_.data() + begin_, end_ - begin_);
    begin_ = scanned_ = end_;
    ++line_number_;
    return passing_over ? Status::kTooLong : give(text, line);
  }
}

LineReader::Status LineReader::give(std::string_view text, std::string_view& line) {
  if (line_number_ == 1 && text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  if (text.ends_with('\r')) text.remove_suffix(1);
  if (text.size() > max_line_bytes_) return Status::kTooLong;
  line = text;
  return Status::kLine;
}

bool LineReader::fill() {
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    scanned_ -= begin_;
    end_ -= begin_;
    begin_ = 0;
  }
  const size_t needed = end_ + kBlockBytes + kPadding;
  if (buffer_.size() < needed) buffer_.resize(std::max(needed, 2 * end_));
  const size_t space = std::min(buffer_.size() - end_ - kPadding, kBlockBytes);
  const size_t count = source_->read({buffer_.data() + end_, space});
  end_ += count;
  bytes_read_ += static_cast<int64_t>(count);
  if (count > 0 && on_read) on_read();
  return count > 0;
}

}  // namespace espalier
