// SPDX-License-Identifier: Apache-2.0
// Numbers in JSON that do not fit in any 64-bit type.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace espalier {

/// The JSON parser reads all numbers of a line. It refuses the whole line if one of them is beyond 64 bits or
/// beyond the largest double, even in a field that is not part of the format. This returns a line of the same
/// meaning that the parser can read: such numbers become 0 in fields that are not part of the format, and
/// text in ids (an id is text or an integer of any size). Returns nullopt if the line has no such number.
/// Throws InputError "field `F`: ..." if another field has one.
std::optional<std::string> without_large_numbers(std::string_view line);

}  // namespace espalier
