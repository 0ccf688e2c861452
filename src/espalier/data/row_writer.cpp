// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/row_writer.h"

#include <simdjson.h>

#include <array>
#include <cmath>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/data/growing.h"
#include "espalier/data/packed.h"
#include "espalier/data/writer.h"

namespace espalier {
namespace {

/// Appends a row to a text, as a line of JSON.
class RowLine {
 public:
  RowLine(const TrajectoryRow& row, std::string& out) : tokens_(row.input_ids.size()), out_(out) {
    visit_fields(row, *this);
    out_ += "}\n";
  }

  void add(std::string_view name, bool value) {
    key(name);
    out_ += value ? "true" : "false";
  }
  void add(std::string_view name, double value) {
    key(name);
    add_value(value);
  }
  template <typename T>
  void add(std::string_view name, const std::vector<T>& values) {
    key(name);
    add_list(std::span<const T>(values));
  }

  void add(std::string_view name, const std::string& text) {
    ESPALIER_CHECK(simdjson::validate_utf8(text), "cannot write a row: its {} is not UTF-8", name);
    key(name);
    out_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') {
        out_ += '\\';
        out_ += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        fmt::format_to(std::back_inserter(out_), "\\u{:04x}", static_cast<int>(c));
      } else {
        out_ += c;
      }
    }
    out_ += '"';
  }

  void add_logprobs(std::string_view name, const std::vector<double>& values) {
    key(name);
    out_ += "[null";
    for (const double value : std::span(values).subspan(1)) {
      out_ += ',';
      if (std::isnan(value)) {
        out_ += "null";
      } else {
        add_value(value);
      }
    }
    out_ += ']';
  }

  template <typename T, typename Has>
  void add_table(std::string_view name, const std::vector<T>& values, Has has) {
    key(name);
    const size_t width = values.size() / tokens_;
    for (size_t first = 0; first < values.size(); first += width) {
      out_ += first > 0 ? ',' : '[';
      add_list(std::span<const T>(values).subspan(first, has(first) ? width : 0));
    }
    out_ += ']';
  }

 private:
  void key(std::string_view name) {
    out_ += std::exchange(separator_, ',');
    out_ += '"';
    out_ += name;
    out_ += "\":";
  }

  void add_value(double value) {
    ESPALIER_CHECK(std::isfinite(value), "cannot write {}: JSON has finite numbers only", value);
    // As an integer, -0 would lose its sign.
    if (value == 0 && std::signbit(value)) {
      out_ += "-0.0";
    } else {
      fmt::format_to(std::back_inserter(out_), "{}", value);
    }
  }
  template <typename Integer>
  void add_value(Integer value) {
    const fmt::format_int text(value);
    out_.append(text.data(), text.size());
  }

  template <typename T>
  void add_list(std::span<const T> values) {
    char before = '[';
    for (const T value : values) {
      out_ += std::exchange(before, ',');
      add_value(value);
    }
    out_ += values.empty() ? "[]" : "]";
  }

  size_t tokens_;
  std::string& out_;
  char separator_ = '{';
};

}  // namespace

class RowWriter::Form {
 public:
  virtual ~Form() = default;
  virtual void check(const TrajectoryRow& row) const { check_row(row); }
  virtual void add(const TrajectoryRow& row) = 0;
  virtual void commit() = 0;
};

class RowWriter::Lines : public Form {
 public:
  explicit Lines(const std::filesystem::path& path) : sink_(open_sink(path)) {}

  void add(const TrajectoryRow& row) override {
    constexpr size_t kFlushBytes = size_t{1} << 20;
    RowLine(row, text_);
    if (text_.size() < kFlushBytes) return;
    sink_->write(text_);
    text_.clear();
  }
  void commit() override {
    sink_->write(text_);
    sink_->commit();
  }

 private:
  std::unique_ptr<TextSink> sink_;
  std::string text_;  // not written yet
};

class RowWriter::Packed : public Form {
 public:
  Packed(const std::filesystem::path& path, int64_t memory)
      : path_(path),
        place_(std::make_unique<AtomicFile>(path)),
        store_{.memory = memory, .begin = [path] { return path; }},
        builder_(store_) {
    for (Texts& texts : texts_) texts.offsets.fill_to(1, 0);
  }

  void check(const TrajectoryRow& row) const override { builder_.check(row); }

  void add(const TrajectoryRow& row) override {
    TrajectoryRow rest = row;  // the builder holds texts in memory
    for (Texts& texts : texts_) {
      const std::string text = std::exchange(rest.*texts.member, {});
      texts.bytes.append(std::span(text.data(), text.size()));
      const auto end = static_cast<int64_t>(texts.bytes.size());
      texts.offsets.append(std::span(&end, 1));
    }
    builder_.append_checked(rest);
  }

  void commit() override {
    PackedOptions options{.keeps_doubles = true};
    for (Texts& texts : texts_)
      options.texts.push_back({texts.name, texts.bytes.finish(), texts.offsets.finish()});
    place_.reset();
    write_packed(path_, builder_.finish(), options);
  }

 private:
  /// A column of texts.
  struct Texts {
    const char* name;
    std::string TrajectoryRow::* member;
    Growing<uint8_t> bytes;
    Growing<int64_t> offsets;
  };

  std::filesystem::path path_;
  std::unique_ptr<AtomicFile> place_;  // so that a file that cannot be written is told at the beginning
  RowStore store_;
  TrajectoriesBuilder builder_;
  std::array<Texts, 3> texts_{{
      {"trajectory_id", &TrajectoryRow::trajectory_id, Growing<uint8_t>(&store_), Growing<int64_t>(&store_)},
      {"group_id", &TrajectoryRow::group_id, Growing<uint8_t>(&store_), Growing<int64_t>(&store_)},
      {"pair_id", &TrajectoryRow::pair_id, Growing<uint8_t>(&store_), Growing<int64_t>(&store_)},
  }};
};

RowWriter::RowWriter(const std::filesystem::path& path, int64_t memory) {
  if (path.extension() == ".safetensors") {
    form_ = std::make_unique<Packed>(path, memory);
    return;
  }
  ESPALIER_CHECK(path.stem().extension() != ".safetensors",
                 "cannot write {}: packed files are mapped, so they cannot be compressed", path.string());
  form_ = std::make_unique<Lines>(path);
}

RowWriter::~RowWriter() = default;

void RowWriter::add(const TrajectoryRow& row) {
  form_->check(row);
  form_->add(row);
}

void RowWriter::add_checked(const TrajectoryRow& row) {
  form_->add(row);
}

void RowWriter::commit() {
  form_->commit();
}

}  // namespace espalier
