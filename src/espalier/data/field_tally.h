// SPDX-License-Identifier: Apache-2.0
// Which fields the rows of a file have, known and unknown, and how much of their text carries loss.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/data/fields.h"

namespace espalier {

/// A field that is not part of the format.
struct IgnoredField {
  std::string name;  // as the file has it: fit for a terminal only through printable()
  int64_t rows = 0;
  int64_t per_token_rows = 0;  // of these: a list with one entry for each token

  /// Whether it is a per-token field, and not a list whose length matches by chance.
  bool is_per_token() const { return per_token_rows > 0 && 2 * per_token_rows >= rows; }
};

/// Counts over the rows that were kept.
struct FieldTally {
  static constexpr size_t kMostIgnored = 1000;  // names that are kept; what data has as keys may be anything

  int64_t tokens = 0;
  int64_t loss_tokens = 0;                     // with a weight above 0, the first token of a row not counted
  int64_t rows_without_mask = 0;               // every token carries loss
  std::array<int64_t, kNumFieldNames> rows{};  // that have a field by the name of this place in kFieldNames
  std::array<int64_t, kNumFieldNames> number_rows{};  // of these, rows in which an id is a number, not text
  std::vector<IgnoredField> ignored;                  // in order of first appearance
  bool more_ignored = false;                          // than kMostIgnored

  /// Rows that have the field under any of its names. A row with two of its names counts twice.
  int64_t rows_with(Field field) const;

  /// One more row, or `rows` of them, with an unknown field.
  void ignore(std::string_view name, int64_t rows, int64_t per_token_rows);
  void add(const FieldTally& other);

 private:
  size_t next_ = 0;  // rows of a file mostly have the same fields in the same order
};

}  // namespace espalier
