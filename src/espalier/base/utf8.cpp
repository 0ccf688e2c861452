// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/utf8.h"

namespace espalier {
namespace {

/// A code point below 2048.
std::string utf8(int code_point) {
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3F))};
}

}  // namespace

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

std::array<std::string, 256> byte_characters() {
  std::array<std::string, 256> characters;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    characters[byte] = utf8(printable ? byte : next++);
  }
  return characters;
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
