// SPDX-License-Identifier: Apache-2.0
// Characters of UTF-8.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace espalier {

/// The length in bytes (1 to 4) of the UTF-8 character that starts at bytes[begin]. 0 if no valid one starts
/// there: truncated, overlong, a surrogate, or beyond U+10FFFF.
size_t character_size(std::string_view bytes, size_t begin);

/// The visible character that byte-level tokenizers (GPT-2 and after) write for each byte: the printable ones
/// of Latin-1 stand for themselves, the others for the code points from 256 on, in order.
std::array<std::string, 256> byte_characters();

bool is_utf8(std::string_view bytes);

}  // namespace espalier
