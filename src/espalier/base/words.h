// SPDX-License-Identifier: Apache-2.0
// Tables of the words that a flag accepts and their values. Parsers, messages and --help use the same table.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/check.h"

namespace espalier {

template <class Value>
struct Word {
  std::string_view word;
  Value value;
};

/// All words, in the order in which they are listed for users.
template <class Value, size_t kCount>
std::vector<std::string> all_words(const std::array<Word<Value>, kCount>& words) {
  std::vector<std::string> all;
  all.reserve(kCount);
  for (const auto& entry : words) all.emplace_back(entry.word);
  return all;
}

/// "red, green or blue".
template <class Value, size_t kCount>
std::string list_of(const std::array<Word<Value>, kCount>& words) {
  std::string list;
  for (size_t i = 0; i < kCount; ++i) {
    list += i == 0 ? "" : i + 1 < kCount ? ", " : " or ";
    list += words[i].word;
  }
  return list;
}

template <class Value, size_t kCount>
bool has_word(const std::array<Word<Value>, kCount>& words, std::string_view text) {
  return std::ranges::any_of(words, [&](const auto& entry) { return entry.word == text; });
}

/// The value of the word `text`. Throws InputError naming `flag` and the words.
template <class Value, size_t kCount>
Value parse_word(const std::array<Word<Value>, kCount>& words, std::string_view flag, std::string_view text) {
  for (const auto& entry : words) {
    if (entry.word == text) return entry.value;
  }
  throw InputError(fmt::format("{}: expected {}, received `{}`", flag, list_of(words), text));
}

/// The word for a value. Throws InternalError if there is none.
template <class Value, size_t kCount>
const char* word_of(const std::array<Word<Value>, kCount>& words, Value value) {
  for (const auto& entry : words) {
    if (entry.value == value) return entry.word.data();
  }
  throw InternalError("expected a value that has a word, received one without");
}

}  // namespace espalier
