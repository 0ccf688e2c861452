// SPDX-License-Identifier: Apache-2.0
// Counts which fields the rows of a file have, known and unknown, and how many tokens carry loss.
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
  std::string name;  // as in the file: print it through printable()
  int64_t rows = 0;
  int64_t per_token_rows = 0;  // rows in which it is a list with one entry per token

  /// Whether it is a per-token field in most rows, so that the lengths do not match by chance.
  bool is_per_token() const { return per_token_rows > 0 && 2 * per_token_rows >= rows; }
};

/// Counts over the good rows.
struct FieldTally {
  static constexpr size_t kMostIgnored = 1000;  // limit of stored names, because keys may be arbitrary data

  int64_t tokens = 0;
  int64_t loss_tokens = 0;                     // tokens of weight above 0, except the first of each row
  int64_t rows_without_mask = 0;               // rows in which every token carries loss
  std::array<int64_t, kNumFieldNames> rows{};  // rows that have kFieldNames[i]
  std::array<int64_t, kNumFieldNames> number_rows{};  // of these, rows in which the id is a number, not text
  std::vector<IgnoredField> ignored;                  // in order of first appearance
  bool more_ignored = false;                          // there were more than kMostIgnored

  /// Rows that have the field under any name. A row with two names of the field counts twice.
  int64_t rows_with(Field field) const;

  /// Adds `rows` rows with an unknown field.
  void ignore(std::string_view name, int64_t rows, int64_t per_token_rows);
  void add(const FieldTally& other);

 private:
  size_t next_ = 0;  // where to look first: rows mostly have the same fields in the same order
};

}  // namespace espalier
