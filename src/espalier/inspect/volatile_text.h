// SPDX-License-Identifier: Apache-2.0
// Text that differs between otherwise equal requests: dates, times, counters, ids.
#pragma once

#include <string>
#include <string_view>

namespace espalier {

enum class Volatile {
  kNone,        // a word differs that is neither
  kNumber,      // dates, times, counters and other numbers
  kIdentifier,  // an id (a uuid, a request id, a hash), possibly with numbers
};

/// Whether `text` has only digits with the separators of dates and times, or names of months and weekdays.
bool is_date_or_number(std::string_view text);

/// Whether a word mixes letters and digits like an id: a uuid, req_8f21ac, HAT136.
bool is_identifier(std::string_view word);

struct VolatileDifference {
  Volatile kind = Volatile::kNone;
  std::string left, right;  // the words that differ
};

/// Compares two texts word by word. Equal words may be between those that differ.
VolatileDifference volatile_difference(std::string_view left, std::string_view right);

/// The end of `before`, and the start of `after`, that belong to the same word as the text in between. Empty
/// unless it may be part of an id, with digits among its letters.
std::string_view word_end(std::string_view before);
std::string_view word_start(std::string_view after);

}  // namespace espalier
