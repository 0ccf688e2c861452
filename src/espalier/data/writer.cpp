// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/writer.h"

#include <simdjson.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/data/packed.h"
#include "espalier/data/row_checks.h"

namespace espalier {
namespace {

/// Writes rows as lines of JSON.
class RowWriter {
 public:
  explicit RowWriter(const Trajectories& trajectories)
      : t_(trajectories), mask_(std::get_if<Column<uint8_t>>(&trajectories.loss_weights.values())) {}

  void append(int64_t r, std::string& out) {
    out_ = &out;
    separator_ = '{';
    const int64_t begin = t_.offsets[r], end = t_.offsets[r + 1];
    add_text("trajectory_id", t_.trajectory_id, r);
    add_text("group_id", t_.group_id, r);
    add_text("pair_id", t_.pair_id, r);
    if (t_.chosen.has(r)) {
      key("chosen");
      out += t_.chosen.values[r] != 0 ? "true" : "false";
    }
    for (const RowReal& real : kRowReals) {
      const Optional<RealColumn>& column = t_.*real.column;
      if (!column.has(r)) continue;
      key(real.name);
      add_real(column.values[r]);
    }
    if (t_.has_turn_rewards(r))
      add_reals("turn_rewards", t_.turn_rewards, t_.turn_reward_offsets[r], t_.turn_reward_offsets[r + 1]);
    add_integers("input_ids", t_.row(r));
    if (mask_ != nullptr) {
      add_integers("loss_mask", mask_->span().subspan(begin, end - begin));
    } else {
      add_reals("loss_weights", t_.loss_weights, begin, end);
    }
    add_logprobs("logprobs", t_.logprobs, r);
    add_logprobs("ref_logprobs", t_.ref_logprobs, r);
    if (t_.advantages.has(r)) add_reals("advantages", t_.advantages.values, begin, end);
    add_ref_topk(begin, end);
    add_routes(begin, end);
    out += "}\n";
  }

 private:
  void key(std::string_view name) {
    *out_ += separator_;
    separator_ = ',';
    fmt::format_to(std::back_inserter(*out_), "\"{}\":", name);
  }

  void add_real(double value) {
    ESPALIER_CHECK(std::isfinite(value), "cannot write {}: JSON has finite numbers only", value);
    // As an integer, -0 would lose its sign.
    if (value == 0 && std::signbit(value)) {
      *out_ += "-0.0";
    } else {
      fmt::format_to(std::back_inserter(*out_), "{}", value);
    }
  }

  template <typename T>
  void add_list(std::span<const T> values) {
    char before = '[';
    for (const T value : values) {
      *out_ += before;
      before = ',';
      const fmt::format_int text(value);
      out_->append(text.data(), text.size());
    }
    *out_ += values.empty() ? "[]" : "]";
  }

  template <typename T>
  void add_integers(std::string_view name, std::span<const T> values) {
    key(name);
    add_list(values);
  }

  void add_reals(std::string_view name, const RealColumn& column, int64_t begin, int64_t end) {
    key(name);
    add_real_list(column, begin, end);
  }

  void add_real_list(const RealColumn& column, int64_t begin, int64_t end) {
    *out_ += '[';
    for (int64_t i = begin; i < end; ++i) {
      if (i > begin) *out_ += ',';
      add_real(column[i]);
    }
    *out_ += ']';
  }

  void add_logprobs(std::string_view name, const Optional<RealColumn>& column, int64_t r) {
    if (!column.has(r)) return;
    key(name);
    *out_ += "[null";
    for (int64_t i = t_.offsets[r] + 1; i < t_.offsets[r + 1]; ++i) {
      *out_ += ',';
      add_real(column.values[i]);
    }
    *out_ += ']';
  }

  void add_text(std::string_view name, const std::vector<std::string>& column, int64_t r) {
    if (column.empty() || column[r].empty()) return;
    const std::string& text = column[r];
    ESPALIER_CHECK(simdjson::validate_utf8(text), "cannot write row {}: its {} is not UTF-8", r, name);
    key(name);
    *out_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') {
        *out_ += '\\';
        *out_ += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        fmt::format_to(std::back_inserter(*out_), "\\u{:04x}", static_cast<int>(c));
      } else {
        *out_ += c;
      }
    }
    *out_ += '"';
  }

  void add_ref_topk(int64_t begin, int64_t end) {
    const int64_t width = t_.ref_topk;
    const auto ids = t_.ref_topk_ids.span();
    if (width == 0 || !has_ref_topk(ids.subspan(begin * width, (end - begin) * width))) return;
    const auto add_tokens = [&](std::string_view name, const auto& add_token) {
      key(name);
      for (int64_t token = begin; token < end; ++token) {
        *out_ += token > begin ? ',' : '[';
        if (ids[token * width] < 0) {
          *out_ += "[]";
        } else {
          add_token(token * width);
        }
      }
      *out_ += ']';
    };
    add_tokens("ref_topk_ids", [&](int64_t first) { add_list(ids.subspan(first, width)); });
    add_tokens("ref_topk_logprobs",
               [&](int64_t first) { add_real_list(t_.ref_topk_logprobs, first, first + width); });
  }

  void add_routes(int64_t begin, int64_t end) {
    const int64_t width = t_.routes_per_token;
    // The routes of a row without routes are all -1.
    if (width == 0 || begin == end || t_.routed_experts[begin * width] < 0) return;
    key("routed_experts");
    *out_ += '[';
    for (int64_t token = begin; token < end; ++token) {
      if (token > begin) *out_ += ',';
      add_list(t_.routed_experts.span().subspan(token * width, width));
    }
    *out_ += ']';
  }

  const Trajectories& t_;
  const Column<uint8_t>* mask_;
  std::string* out_ = nullptr;
  char separator_ = '{';
};

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
  ESPALIER_CHECK(path.stem().extension() != ".safetensors",
                 "cannot write {}: packed files are mapped, so they cannot be compressed", path.string());
  constexpr size_t kFlushBytes = size_t{1} << 20;
  const std::unique_ptr<TextSink> sink = open_sink(path);
  RowWriter writer(trajectories);
  std::string text;
  for (int64_t r = 0; r < trajectories.num_rows(); ++r) {
    writer.append(r, text);
    if (text.size() < kFlushBytes) continue;
    sink->write(text);
    text.clear();
  }
  sink->write(text);
  sink->commit();
}

std::unique_ptr<TextSink> open_sink(const std::filesystem::path& path) {
  if (path.extension() == ".gz") return std::make_unique<GzipSink>(path);
  if (path.extension() == ".zst") return std::make_unique<ZstdSink>(path);
  return std::make_unique<PlainSink>(path);
}

}  // namespace espalier
