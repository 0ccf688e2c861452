// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/writer.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <new>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/data/packed.h"
#include "espalier/data/row_writer.h"

namespace espalier {
namespace {

class PlainSink : public TextSink {
 public:
  explicit PlainSink(const std::filesystem::path& path) : file_(path) {}
  void write(std::string_view text) override { file_.write(text); }
  void commit() override { file_.commit(); }

 private:
  AtomicFile file_;
};

class GzipSink : public TextSink {
 public:
  explicit GzipSink(const std::filesystem::path& path) : file_(path), block_(size_t{1} << 18) {
    // Window bits: 15, plus 16 for a gzip header, whose time stays 0. Memory level 8 is zlib's default.
    if (::deflateInit2(&stream_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK)
      throw std::bad_alloc();
  }
  ~GzipSink() override { ::deflateEnd(&stream_); }

  void write(std::string_view text) override {
    // zlib uses 32-bit sizes.
    for (; !text.empty(); text.remove_prefix(std::min(text.size(), block_.size()))) {
      compress(text.substr(0, block_.size()), Z_NO_FLUSH);
    }
  }

  void commit() override {
    compress({}, Z_FINISH);
    file_.commit();
  }

 private:
  void compress(std::string_view text, int flush) {
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
    stream_.avail_in = static_cast<uInt>(text.size());
    do {
      stream_.next_out = reinterpret_cast<Bytef*>(block_.data());
      stream_.avail_out = static_cast<uInt>(block_.size());
      const int result = ::deflate(&stream_, flush);
      ESPALIER_ASSERT(result != Z_STREAM_ERROR);
      file_.write(std::string_view(block_.data(), block_.size() - stream_.avail_out));
    } while (stream_.avail_out == 0);
  }

  AtomicFile file_;
  std::vector<char> block_;
  z_stream stream_{};
};

class ZstdSink : public TextSink {
 public:
  explicit ZstdSink(const std::filesystem::path& path)
      : file_(path), block_(size_t{1} << 18), context_(::ZSTD_createCCtx()) {
    if (!context_) throw std::bad_alloc();
    ESPALIER_ASSERT(!::ZSTD_isError(::ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_checksumFlag, 1)));
  }

  void write(std::string_view text) override { compress(text, ZSTD_e_continue); }

  void commit() override {
    compress({}, ZSTD_e_end);
    file_.commit();
  }

 private:
  struct Free {
    void operator()(ZSTD_CCtx* context) const { ::ZSTD_freeCCtx(context); }
  };

  void compress(std::string_view text, ZSTD_EndDirective directive) {
    ZSTD_inBuffer input{text.data(), text.size(), 0};
    bool done = false;
    while (!done) {
      ZSTD_outBuffer output{block_.data(), block_.size(), 0};
      const size_t result = ::ZSTD_compressStream2(context_.get(), &output, &input, directive);
      ESPALIER_ASSERT(!::ZSTD_isError(result));
      file_.write(std::string_view(block_.data(), output.pos));
      done = directive == ZSTD_e_end ? result == 0 : input.pos == input.size;
    }
  }

  AtomicFile file_;
  std::vector<char> block_;
  std::unique_ptr<ZSTD_CCtx, Free> context_;
};

}  // namespace

void write_trajectories(const std::filesystem::path& path, const Trajectories& trajectories) {
  if (path.extension() == ".safetensors") return write_packed(path, trajectories);
  RowWriter writer(path);
  for (int64_t r = 0; r < trajectories.num_rows(); ++r) writer.add_checked(copy_row(trajectories, r));
  writer.commit();
}

std::unique_ptr<TextSink> open_sink(const std::filesystem::path& path) {
  if (path.extension() == ".gz") return std::make_unique<GzipSink>(path);
  if (path.extension() == ".zst") return std::make_unique<ZstdSink>(path);
  return std::make_unique<PlainSink>(path);
}

}  // namespace espalier
