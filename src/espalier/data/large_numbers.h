// SPDX-License-Identifier: Apache-2.0
// Numbers in JSON that do not fit in any 64-bit type.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace espalier {

/// The JSON parser refuses a line if any of its numbers exceeds 64 bits or the largest double, even in a
/// field that is not part of the format. This returns an equivalent line that the parser accepts: such
/// numbers become 0 in fields that are not part of the format, and text in ids (an id is text or an integer
/// of any size). Returns nullopt if the line has no such number. Throws InputError "field `F`: ..." if
/// another field has one.
std::optional<std::string> without_large_numbers(std::string_view line);

}  // namespace espalier
