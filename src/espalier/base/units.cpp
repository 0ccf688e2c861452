// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/units.h"

#include <fmt/format.h>

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

std::string human_seconds(double seconds) {
  if (seconds < 60) return fmt::format("{:.0f}s", seconds);
  const int64_t whole = static_cast<int64_t>(seconds);
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  return fmt::format("{}h {:02}m", whole / 3600, whole / 60 % 60);
}

}  // namespace espalier
