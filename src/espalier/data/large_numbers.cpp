// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/large_numbers.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <system_error>

#include "espalier/base/printable.h"
#include "espalier/data/fields.h"
#include "espalier/data/row_checks.h"

namespace espalier {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

struct Number {
  size_t size = 0;  // 0: no JSON number begins here
  bool is_integer = false;
};

/// The number that `text` begins with: -?(0|[1-9][0-9]*)([.][0-9]+)?([eE][+-]?[0-9]+)?
Number number_at(std::string_view text) {
  size_t i = 0;
  const auto digits = [&] {
    const size_t begin = i;
    while (i < text.size() && is_digit(text[i])) ++i;
    return i - begin;
  };
  if (i < text.size() && text[i] == '-') ++i;
  const size_t first = i;
  const size_t whole = digits();
  if (whole == 0 || (whole > 1 && text[first] == '0')) return {};
  Number number{i, true};
  if (i < text.size() && text[i] == '.') {
    ++i;
    if (digits() == 0) return {};
    number = {i, false};
  }
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    ++i;
    if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
    if (digits() == 0) return {};
    number = {i, false};
  }
  return number;
}

bool is_too_large(std::string_view text, bool is_integer) {
  if (!is_integer) return std::isinf(std::strtod(std::string(text).c_str(), nullptr));
  const char* begin = text.data();  // NOLINT(bugprone-suspicious-stringview-data-usage): its end goes along
  const char* end = begin + text.size();
  int64_t negative = 0;
  uint64_t positive = 0;
  const auto result =
      text.front() == '-' ? std::from_chars(begin, end, negative) : std::from_chars(begin, end, positive);
  return result.ec == std::errc::result_out_of_range;
}

/// Copies a line and replaces its large numbers, tracking the field of the outermost object.
class Copier {
 public:
  explicit Copier(std::string_view line) : line_(line) {}

  std::optional<std::string> run() {
    while (at_ < line_.size()) {
      const char c = line_[at_];
      if (c == '"') {
        string();
      } else if (c == '-' || is_digit(c)) {
        number();
      } else {
        depth_ += (c == '{' || c == '[') - (c == '}' || c == ']');
        ++at_;
      }
    }
    if (!changed_) return std::nullopt;
    out_ += line_.substr(copied_);
    return std::move(out_);
  }

 private:
  void string() {
    const size_t begin = ++at_;
    while (at_ < line_.size() && line_[at_] != '"') at_ += line_[at_] == '\\' ? 2 : 1;
    const size_t end = std::min(at_, line_.size());
    at_ = end + 1;
    const size_t next = line_.find_first_not_of(" \t\r", std::min(at_, line_.size()));
    if (depth_ == 1 && next != std::string_view::npos && line_[next] == ':')
      key_ = line_.substr(begin, end - begin);
  }

  void number() {
    const Number number = number_at(line_.substr(at_));
    if (number.size == 0) {
      ++at_;
      return;
    }
    const std::string_view text = line_.substr(at_, number.size);
    if (is_too_large(text, number.is_integer)) replace(text, number.is_integer);
    at_ += number.size;
  }

  void replace(std::string_view text, bool is_integer) {
    changed_ = true;
    out_ += line_.substr(copied_, at_ - copied_);
    copied_ = at_ + text.size();
    const std::optional<size_t> known = find_field_name(key_);
    // A field name with escapes may still be part of the format.
    const bool is_ours = known || key_.find('\\') != std::string_view::npos;
    if (!is_ours) {
      out_ += '0';
    } else if (known && is_id(kFieldNames[*known].field) && is_integer && depth_ == 1) {
      out_ += '"';
      out_ += text;
      out_ += '"';
    } else {
      throw_field(key_, "numbers within 64 bits", shortened(text));
    }
  }

  static bool is_id(Field field) {
    return field == Field::kGroupId || field == Field::kTrajectoryId || field == Field::kPairId;
  }

  std::string_view line_;
  std::string_view key_;  // the last one of the outermost object
  std::string out_;
  size_t at_ = 0;
  size_t copied_ = 0;  // of the line, to out_
  int depth_ = 0;
  bool changed_ = false;
};

}  // namespace

std::optional<std::string> without_large_numbers(std::string_view line) {
  return Copier(line).run();
}

}  // namespace espalier
