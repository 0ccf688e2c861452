// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/units.h"

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <cmath>

namespace espalier {

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value < 0 ? -value : value);
  for (size_t i = digits.size(); i > 3;) digits.insert(digits.begin() + static_cast<int64_t>(i -= 3), ',');
  return value < 0 ? "-" + digits : digits;
}

std::string count_of(int64_t count, const std::string& singular, const std::string& plural) {
  return with_commas(count) + " " + (count == 1 ? singular : plural);
}

std::string human_bytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, units[unit]);
}

std::optional<int64_t> parse_bytes(std::string_view text) {
  double number = 0;
  const char* const begin = text.begin();
  const char* const end = text.end();
  const auto [last, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || !(number >= 0)) return std::nullopt;
  std::string unit;
  for (const char c : std::string_view(last, end)) {
    if (c != ' ' || !unit.empty()) unit += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  if (unit.ends_with('b')) unit.pop_back();
  const bool is_binary = unit.ends_with('i');
  if (is_binary) unit.pop_back();
  constexpr std::string_view kPrefixes = "kmgtpe";
  const size_t prefix = unit.size() == 1 ? kPrefixes.find(unit[0]) : std::string_view::npos;
  if (prefix == std::string_view::npos && (!unit.empty() || is_binary)) return std::nullopt;
  const double power = unit.empty() ? 0.0 : static_cast<double>(prefix + 1);
  const double bytes = number * std::pow(is_binary ? 1024.0 : 1000.0, power);
  if (!(bytes < 0x1p63)) return std::nullopt;
  return static_cast<int64_t>(bytes);
}

}  // namespace espalier
