// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/reader.h"

#include <fmt/ranges.h>
#include <simdjson.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/base/printable.h"
#include "espalier/data/builder.h"
#include "espalier/data/large_numbers.h"
#include "espalier/data/line_reader.h"
#include "espalier/data/row_checks.h"
#include "espalier/data/row_parser.h"
#include "espalier/data/row_report.h"

namespace espalier {
namespace {

namespace dom = simdjson::dom;

/// A row without token ids, by the names of its fields.
std::string without_ids(const std::vector<std::string_view>& fields) {
  constexpr size_t kMost = 8;
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(kMost, fields.size()); ++i)
    names.push_back(fmt::format("`{}`", shortened(fields[i], 30)));
  if (names.empty()) return "an object without fields";
  return fmt::format("a row without it (its fields: {}{})", fmt::join(names, ", "),
                     fields.size() > kMost ? ", ..." : "");
}

static_assert(LineReader::kPadding >= simdjson::SIMDJSON_PADDING);

/// A description of an element for error messages.
std::string described(dom::element element) {
  switch (element.type()) {
    case dom::element_type::ARRAY:
      return fmt::format("a list of {}", dom::array(element).size());
    case dom::element_type::OBJECT:
      return "an object";
    default:
      return shortened(simdjson::minify(element));
  }
}

/// Finds a bare NaN or Infinity, which Python writes although JSON does not allow it.
struct BareNumber {
  std::string field;  // the last key of the outermost object
  std::string_view text;
};

std::optional<BareNumber> find_bare_number(std::string_view line) {
  BareNumber found;
  int depth = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"') {
      const size_t begin = ++i;
      while (i < line.size() && line[i] != '"') i += line[i] == '\\' ? 2 : 1;
      const size_t next = line.find_first_not_of(" \t", i + 1);
      if (depth == 1 && next < line.size() && line[next] == ':') found.field = line.substr(begin, i - begin);
    } else if (line[i] == '{' || line[i] == '[') {
      ++depth;
    } else if (line[i] == '}' || line[i] == ']') {
      --depth;
    } else {
      for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
        if (!line.substr(i).starts_with(word)) continue;
        found.text = word;
        return found;
      }
    }
  }
  return std::nullopt;
}

[[noreturn]] void throw_malformed(std::string_view line, simdjson::error_code error) {
  if (const auto bare = find_bare_number(line))
    throw_field(shortened(bare->field), "finite numbers (JSON has no NaN and no Infinity)", bare->text);
  throw InputError(fmt::format("expected a JSON object, received `{}` (not JSON: {})", shortened(line),
                               simdjson::error_message(error)));
}

/// Whether a list that exporters add to every row is redundant: a mask without padding, or positions from 0.
bool is_redundant(std::string_view name, dom::array array) {
  const bool is_mask = name == "attention_mask";
  if (!is_mask && name != "position_ids") return false;
  int64_t expected = is_mask ? 1 : 0;
  for (const dom::element item : array) {
    int64_t value = -1;
    bool truth = false;
    if (item.get(truth) == simdjson::SUCCESS) {
      value = truth;
    } else if (item.get(value) != simdjson::SUCCESS) {
      return false;
    }
    if (value != expected) return false;
    if (!is_mask) ++expected;
  }
  return true;
}

/// Values of simdjson for RowParser.
class JsonElement {
 public:
  JsonElement() = default;
  explicit JsonElement(dom::element value) : value_(value) {}

  class List {
   public:
    class Iterator {
     public:
      explicit Iterator(dom::array::iterator at) : at_(at) {}
      JsonElement operator*() const { return JsonElement(*at_); }
      Iterator& operator++() {
        ++at_;
        return *this;
      }
      bool operator!=(const Iterator& other) const { return at_ != other.at_; }

     private:
      dom::array::iterator at_;
    };

    explicit List(dom::array array) : array_(array) {}
    Iterator begin() const { return Iterator(array_.begin()); }
    Iterator end() const { return Iterator(array_.end()); }
    size_t size() const { return array_.size(); }

   private:
    dom::array array_;
  };

  bool is_null() const { return value_.is_null(); }
  bool is_text() const { return value_.is_string(); }
  bool is_integer() const { return value_.is_int64() || value_.is_uint64(); }
  template <typename T>
  bool get(T& value) const {
    return value_.get(value) == simdjson::SUCCESS;
  }
  bool get(std::string& text) const {
    std::string_view view;
    int64_t integer = 0;
    uint64_t large = 0;
    if (get(view)) {
      text = view;
    } else if (get(integer)) {
      text = std::to_string(integer);
    } else if (get(large)) {
      text = std::to_string(large);
    } else {
      return false;
    }
    return true;
  }
  std::optional<List> list() const {
    dom::array array;
    return get(array) ? std::optional(List(array)) : std::nullopt;
  }
  template <typename T>
  bool copy(std::vector<T>&) const {
    return false;
  }
  std::string described() const { return espalier::described(value_); }

 private:
  dom::element value_;
};

/// Parses lines into rows. Reuses its memory from line to line.
class LineParser {
 public:
  LineParser(int64_t vocab_size, FieldTally* tally) : tally_(*tally), row_(vocab_size) {}

  /// Parses `line`, which must be followed by LineReader::kPadding readable bytes, as RowParser does. The
  /// result is valid until the next call.
  const TrajectoryRow& parse(std::string_view line);

  /// Counts the fields of the last row as good.
  void keep(const TrajectoryRow& row);

 private:
  dom::object parse_object(std::string_view line);
  [[noreturn]] void throw_without_ids(std::string_view line);

  FieldTally& tally_;
  dom::parser parser_;
  RowParser<JsonElement> row_;
  std::vector<std::pair<std::string_view, dom::element>> unknown_;
};

dom::object LineParser::parse_object(std::string_view line) {
  dom::element root;
  auto error = parser_.parse(line.data(), line.size(), false).get(root);
  if (error != simdjson::SUCCESS) {
    const std::optional<std::string> readable = without_large_numbers(line);
    if (readable) error = parser_.parse(*readable).get(root);
  }
  dom::object object;
  if (error == simdjson::SUCCESS && root.get(object) == simdjson::SUCCESS) return object;
  if (error != simdjson::SUCCESS) throw_malformed(line, error);
  throw InputError("expected a JSON object, received " + described(root));
}

const TrajectoryRow& LineParser::parse(std::string_view line) {
  row_.begin();
  unknown_.clear();
  for (const auto [key, value] : parse_object(line)) {
    if (!row_.add(key, JsonElement(value)) && !value.is_null()) unknown_.emplace_back(key, value);
  }
  if (!row_.has_ids()) throw_without_ids(line);
  return row_.finish();
}

void LineParser::throw_without_ids(std::string_view line) {
  std::vector<std::string_view> names;
  for (const auto [key, value] : parse_object(line)) names.push_back(key);
  throw_field("input_ids", "a list of token ids", row_.has_seen_ids() ? "null" : without_ids(names));
}

void LineParser::keep(const TrajectoryRow& row) {
  row_.keep(&tally_);
  for (const auto& [name, value] : unknown_) {
    dom::array array;
    const bool per_token = value.get(array) == simdjson::SUCCESS && array.size() == row.input_ids.size() &&
                           !is_redundant(name, array);
    tally_.ignore(name, 1, per_token);
  }
}

}  // namespace

Trajectories read_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report) {
  TrajectoriesBuilder builder(options.store);
  append_jsonl(path, options, report, &builder);
  return builder.finish();
}

void append_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report,
                  TrajectoriesBuilder* builder) {
  const std::string file = path.string();
  // If bad rows are errors, the rest of a line that is too long is not read.
  constexpr int64_t kMostPassedOver = int64_t{1} << 34;
  ESPALIER_CHECK(
      !std::filesystem::is_directory(path),
      "{}: expected a file of trajectories, received a folder; name its files, such as '{}/*.jsonl'", file,
      file);
  LineReader lines(path, options.max_line_bytes, options.skip_bad_rows ? kMostPassedOver : 0);
  RowReport rows(options, report);
  LineParser parser(options.vocab_size, &rows.fields());
  lines.on_read = [&] { rows.progress(lines.fraction(), lines.bytes_read()); };
  std::string_view line;
  while (!rows.enough()) {
    const LineReader::Status status = lines.next(line);
    if (status == LineReader::Status::kEnd) break;
    if (status == LineReader::Status::kTooLong) {
      rows.bad(fmt::format("{}:{}: expected a line of at most {} bytes, received a longer one", file,
                           lines.line_number(), options.max_line_bytes));
      continue;
    }
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const TrajectoryRow* row = nullptr;
    try {
      row = &parser.parse(line);
      builder->check(*row, options.vocab_size);
    } catch (const InputError& error) {
      rows.bad(fmt::format("{}:{}: {}", file, lines.line_number(), error.what()));
      continue;
    }
    builder->append_checked(*row);  // a file that cannot be written is no fault of the row
    parser.keep(*row);
    rows.good();
  }
  rows.finish(file);
}

}  // namespace espalier
