// SPDX-License-Identifier: Apache-2.0
// UTF-8, and text from files and users made safe to print on a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace espalier {

/// `text` as one line of valid UTF-8 that is safe to print: control characters (C0, DEL, C1) are written \n,
/// \t, \r, \x1B or \u009B, characters that reorder or hide the text around them (bidirectional overrides and
/// isolates, zero-width characters, fillers, separators, tags) \u202E, and bytes that are not UTF-8 \xFF.
/// Joiners (U+200C, U+200D) stay: scripts and emoji need them. Every message that quotes a file name, a
/// field, an id or file content uses this function.
std::string printable(std::string_view text);

/// Like printable, but line feeds stay.
std::string printable_lines(std::string_view text);

/// printable(text), limited to `max_bytes` bytes of whole characters, with "..." if it was cut.
std::string shortened(std::string_view text, size_t max_bytes = 60);

/// The length in bytes (1 to 4) of the UTF-8 character that starts at bytes[begin], or 0 if it is invalid:
/// truncated, overlong, a surrogate, or beyond U+10FFFF.
size_t character_size(std::string_view bytes, size_t begin);

bool is_utf8(std::string_view bytes);

}  // namespace espalier
