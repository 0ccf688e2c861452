// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/printable.h"

#include <fmt/format.h>

#include <cstdint>
#include <iterator>

namespace espalier {
namespace {

uint32_t code_point(std::string_view character) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return byte(0);
  uint32_t point = byte(0) & (0xFFu >> (character.size() + 1));
  for (size_t i = 1; i < character.size(); ++i) point = point << 6 | (byte(i) & 0x3Fu);
  return point;
}

/// Whether a character controls the terminal or the text around it and is not itself visible.
bool is_control(uint32_t point) {
  return point < 0x20 || (point >= 0x7F && point < 0xA0) ||        // C0, DEL, C1
         point == 0x00AD || point == 0x061C || point == 0x180E ||  // marks of hyphens, direction, separation
         point == 0x115F || point == 0x1160 || point == 0x3164 || point == 0xFFA0 ||  // Hangul fillers
         point == 0x200B || point == 0x200E || point == 0x200F || (point >= 0x2028 && point <= 0x202E) ||
         (point >= 0x2060 && point <= 0x206F) || point == 0xFEFF || (point >= 0xFFF9 && point <= 0xFFFB) ||
         (point >= 0xE0000 && point <= 0xE007F);
}

void append_escaped(uint32_t point, std::string* out) {
  switch (point) {
    case '\n':
      *out += "\\n";
      return;
    case '\r':
      *out += "\\r";
      return;
    case '\t':
      *out += "\\t";
      return;
    default:
      break;
  }
  if (point < 0x80) {
    fmt::format_to(std::back_inserter(*out), "\\x{:02X}", point);
  } else if (point < 0x10000) {
    fmt::format_to(std::back_inserter(*out), "\\u{:04X}", point);
  } else {
    fmt::format_to(std::back_inserter(*out), "\\U{:08X}", point);
  }
}

std::string made_printable(std::string_view text, bool keep_line_feeds) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const size_t size = character_size(text, i);
    if (size == 0) {
      fmt::format_to(std::back_inserter(result), "\\x{:02X}", static_cast<unsigned char>(text[i]));
      ++i;
      continue;
    }
    const std::string_view character = text.substr(i, size);
    const uint32_t point = code_point(character);
    if (is_control(point) && !(keep_line_feeds && point == '\n')) {
      append_escaped(point, &result);
    } else {
      result += character;
    }
    i += size;
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text) {
  return made_printable(text, false);
}

std::string printable_lines(std::string_view text) {
  return made_printable(text, true);
}

std::string shortened(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return printable(text);
  // A character that crosses the limit is left out.
  size_t end = 0;
  while (end < text.size()) {
    const size_t size = character_size(text, end);
    const size_t next = end + (size == 0 ? 1 : size);
    if (next > max_bytes) break;
    end = next;
  }
  return printable(text.substr(0, end)) + "...";
}

size_t character_size(std::string_view bytes, size_t begin) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[begin + i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t size = lead >= 0xC2 && lead < 0xE0   ? 2
                      : lead >= 0xE0 && lead < 0xF0 ? 3
                      : lead >= 0xF0 && lead < 0xF5 ? 4
                                                    : 0;
  if (size == 0 || begin + size > bytes.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong, a surrogate, or beyond U+10FFFF.
  if ((lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) >= 0xA0)) return 0;
  if ((lead == 0xF0 && byte(1) < 0x90) || (lead == 0xF4 && byte(1) >= 0x90)) return 0;
  return size;
}

bool is_utf8(std::string_view bytes) {
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t size = character_size(bytes, begin);
    if (size == 0) return false;
    begin += size;
  }
  return true;
}

}  // namespace espalier
