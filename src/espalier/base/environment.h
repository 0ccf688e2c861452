// SPDX-License-Identifier: Apache-2.0
// Environment variables.
#pragma once

#include <cstdlib>
#include <optional>
#include <string_view>

#include "espalier/base/words.h"

namespace espalier {

/// The value of a variable; empty where it is not set.
inline std::string_view environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

/// What a variable stands for; nothing where it is empty. Throws InputError naming it and the words.
template <class Value, size_t kCount>
std::optional<Value> named_by_environment(const char* variable,
                                          const std::array<Word<Value>, kCount>& words) {
  const std::string_view text = environment(variable);
  return text.empty() ? std::nullopt : std::optional(parse_word(words, variable, text));
}

}  // namespace espalier
