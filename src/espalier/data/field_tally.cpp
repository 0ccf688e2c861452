// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/field_tally.h"

namespace espalier {

int64_t FieldTally::rows_with(Field field) const {
  int64_t total = 0;
  for (size_t i = 0; i < kNumFieldNames; ++i) {
    if (kFieldNames[i].field == field) total += rows[i];
  }
  return total;
}

void FieldTally::ignore(std::string_view name, int64_t rows_with_it, int64_t per_token_rows) {
  if (next_ >= ignored.size() || ignored[next_].name != name) {
    next_ = 0;
    while (next_ < ignored.size() && ignored[next_].name != name) ++next_;
  }
  if (next_ == ignored.size()) {
    if (ignored.size() >= kMostIgnored) {
      more_ignored = true;
      return;
    }
    ignored.push_back({std::string(name)});
  }
  ignored[next_].rows += rows_with_it;
  ignored[next_].per_token_rows += per_token_rows;
  ++next_;
}

void FieldTally::add(const FieldTally& other) {
  tokens += other.tokens;
  loss_tokens += other.loss_tokens;
  rows_without_mask += other.rows_without_mask;
  for (size_t i = 0; i < kNumFieldNames; ++i) {
    rows[i] += other.rows[i];
    number_rows[i] += other.number_rows[i];
  }
  for (const IgnoredField& field : other.ignored) ignore(field.name, field.rows, field.per_token_rows);
  more_ignored |= other.more_ignored;
}

}  // namespace espalier
