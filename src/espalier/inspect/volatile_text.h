// SPDX-License-Identifier: Apache-2.0
// Text that differs between requests that are otherwise equal: dates, times, counters, ids.
#pragma once

#include <string>
#include <string_view>

namespace espalier {

enum class Volatile {
  kNone,        // some word differs that is none of the others
  kNumber,      // dates, times, counters and other numbers
  kIdentifier,  // an id (a uuid, a request id, a hash) is among what differs
};

/// Digits and what stands around them in dates and times; months and weekdays.
bool is_date_or_number(std::string_view text);

/// Whether a word mixes letters and digits in a way that people do not write: a uuid, req_8f21ac, HAT136.
bool is_identifier(std::string_view word);

struct VolatileDifference {
  Volatile kind = Volatile::kNone;
  std::string left, right;  // the words that differ
};

/// Compares two texts word by word. There may be common words between those that differ.
VolatileDifference volatile_difference(std::string_view left, std::string_view right);

/// The end of `before` that belongs to the same word as what follows it, and the start of `after` that
/// belongs to the same word as what stands before it: only where it may be the rest of an id, with digits
/// among its letters.
std::string_view word_end(std::string_view before);
std::string_view word_start(std::string_view after);

}  // namespace espalier
