// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace espalier {

/// The length in bytes (1 to 4) of the UTF-8 character that starts at bytes[begin], or 0 if it is invalid:
/// truncated, overlong, a surrogate, or beyond U+10FFFF.
size_t character_size(std::string_view bytes, size_t begin);

/// The visible character that byte-level tokenizers (GPT-2 and later) use for each byte: printable Latin-1
/// bytes map to themselves, the others to the code points from 256 on, in order.
std::array<std::string, 256> byte_characters();

bool is_utf8(std::string_view bytes);

}  // namespace espalier
