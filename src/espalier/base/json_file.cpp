// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/json_file.h"

#include <array>
#include <string_view>

namespace espalier::detail {

std::string with_tagged_floats(std::string text) {
  constexpr auto kWords = std::to_array<std::string_view>({"-Infinity", "Infinity", "NaN"});
  if (text.find("Infinity") == std::string::npos && text.find("NaN") == std::string::npos) return text;
  std::string result;
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = std::string_view(text).substr(i);
    size_t taken = 1;
    if (in_string) {
      if (rest[0] == '\\' && rest.size() > 1) taken = 2;
      in_string = rest[0] != '"';
    } else {
      in_string = rest[0] == '"';
      for (const std::string_view word : kWords) {
        if (!rest.starts_with(word)) continue;
        result += fmt::format("{{\"__float__\": \"{}\"}}", word);
        taken = 0;
        i += word.size();
        break;
      }
    }
    result += rest.substr(0, taken);
    i += taken;
  }
  return result;
}

}  // namespace espalier::detail
