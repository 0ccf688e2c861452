// SPDX-License-Identifier: Apache-2.0
// Numbers formatted for people.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace espalier {

/// "1,234,567".
std::string with_commas(int64_t value);
/// "1 row", "2,000 rows".
std::string count_of(int64_t count, const std::string& singular, const std::string& plural);
/// "1.5 GiB".
std::string human_bytes(double bytes);
/// Bytes of "8GiB", "1.5 GB", "300k" or "4096": a number and a unit, in any case. kB, MB, ... are powers of
/// 1000 and KiB, MiB, ... of 1024; the B may be left out. nullopt for other text, and from 2^63 bytes on.
std::optional<int64_t> parse_bytes(std::string_view text);

}  // namespace espalier
