// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/volatile_text.h"

#include <algorithm>
#include <array>
#include <vector>

namespace espalier {
namespace {

constexpr size_t kLongestWord = 64, kLongestText = 512;
// An id may have this many letters per digit.
constexpr size_t kLettersPerDigit = 8;
constexpr std::string_view kSpaces = " \t\r\n";
// Characters other than spaces that end a word on either side.
constexpr std::string_view kOpening = "\"'`([{<>|", kClosing = "\"'`)]}<>|,;!?";

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool is_hex(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (size_t begin = text.find_first_not_of(kSpaces); begin != std::string_view::npos;) {
    const size_t end = std::min(text.find_first_of(kSpaces, begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(kSpaces, end);
  }
  return words;
}

/// The words that `others` do not have; none if one of them is neither a number nor an id.
std::vector<std::string_view> volatile_words(const std::vector<std::string_view>& words,
                                             const std::vector<std::string_view>& others) {
  std::vector<std::string_view> found;
  for (const std::string_view word : words) {
    if (std::find(others.begin(), others.end(), word) != others.end()) continue;
    if (!is_date_or_number(word) && !is_identifier(word)) return {};
    found.push_back(word);
  }
  return found;
}

std::string joined(const std::vector<std::string_view>& words) {
  std::string text;
  for (const std::string_view word : words) text.append(text.empty() ? "" : " ").append(word);
  return text;
}

}  // namespace

bool is_date_or_number(std::string_view text) {
  static constexpr auto kWords = std::to_array<std::string_view>(
      {"january",  "february", "march",    "april",  "may", "june", "july",   "august",  "september",
       "october",  "november", "december", "jan",    "feb", "mar",  "apr",    "jun",     "jul",
       "aug",      "sep",      "sept",     "oct",    "nov", "dec",  "monday", "tuesday", "wednesday",
       "thursday", "friday",   "saturday", "sunday", "mon", "tue",  "tues",   "wed",     "thu",
       "thurs",    "fri",      "sat",      "sun",    "am",  "pm",   "a",      "p",       "t",
       "z",        "utc",      "gmt",      "st",     "nd",  "rd",   "th"});
  if (text.size() > kLongestWord) return false;
  std::string word;
  bool any = false;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ' ';
    if (is_letter(c)) {
      word += static_cast<char>(c | 0x20);
      continue;
    }
    if (!word.empty() && std::find(kWords.begin(), kWords.end(), word) == kWords.end()) return false;
    any |= word.size() > 1 || is_digit(c);
    word.clear();
    if (!is_digit(c) && std::string_view(" \t\n:-/.,+_").find(c) == std::string_view::npos) return false;
  }
  return any;
}

bool is_identifier(std::string_view word) {
  const size_t begin = word.find_first_not_of("\"'`([{<|#");
  const size_t end = word.find_last_not_of("\"'`)]}>|,.;:!?");
  if (begin == std::string_view::npos || end == std::string_view::npos || end < begin) return false;
  word = word.substr(begin, end + 1 - begin);
  if (const size_t name = word.find_last_of("=:/#"); name != std::string_view::npos)
    word = word.substr(name + 1);
  if (word.size() > kLongestWord) return false;
  const auto plain = [](char c) { return is_digit(c) || is_letter(c) || c == '_' || c == '-' || c == '.'; };
  if (!std::all_of(word.begin(), word.end(), plain)) return false;
  const auto digits = std::count_if(word.begin(), word.end(), is_digit);
  const auto letters = std::count_if(word.begin(), word.end(), is_letter);
  const auto hex = std::count_if(word.begin(), word.end(), is_hex);
  if (digits == 0 || letters == 0) return false;
  if (hex == digits + letters && hex >= 8) return true;
  return (digits >= 2 && word.size() >= 5) || word.size() >= 12;
}

VolatileDifference volatile_difference(std::string_view left, std::string_view right) {
  if (left.size() > kLongestText || right.size() > kLongestText) return {};
  const std::vector<std::string_view> left_words = words_of(left), right_words = words_of(right);
  const std::vector<std::string_view> left_found = volatile_words(left_words, right_words),
                                      right_found = volatile_words(right_words, left_words);
  if (left_found.empty() || right_found.empty()) return {};
  const auto is_number = [](std::string_view word) { return is_date_or_number(word); };
  const bool numbers = std::all_of(left_found.begin(), left_found.end(), is_number) &&
                       std::all_of(right_found.begin(), right_found.end(), is_number);
  return {numbers ? Volatile::kNumber : Volatile::kIdentifier, joined(left_found), joined(right_found)};
}

std::string_view word_end(std::string_view before) {
  const size_t space = before.find_last_of(kSpaces), mark = before.find_last_of(kOpening);
  const auto after = [](size_t found) { return found == std::string_view::npos ? 0 : found + 1; };
  const std::string_view word = before.substr(std::max(after(space), after(mark)));
  return word.size() > kLongestWord ? std::string_view() : word;
}

std::string_view word_start(std::string_view after) {
  const size_t end = std::min({after.find_first_of(kSpaces), after.find_first_of(kClosing), after.size()});
  const std::string_view word = after.substr(0, end);
  const auto digits = static_cast<size_t>(std::count_if(word.begin(), word.end(), is_digit));
  const bool goes_on = word.size() <= kLongestWord && digits > 0 && kLettersPerDigit * digits >= word.size();
  return goes_on ? word : std::string_view();
}

}  // namespace espalier
