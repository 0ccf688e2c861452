// SPDX-License-Identifier: Apache-2.0
// Numbers formatted for people.
#pragma once

#include <cstdint>
#include <string>

namespace espalier {

/// "1,234,567".
std::string with_commas(int64_t value);
/// "1 row", "2,000 rows".
std::string count_of(int64_t count, const std::string& singular, const std::string& plural);
/// "1.5 GiB".
std::string human_bytes(double bytes);
/// "2m 05s".
std::string human_seconds(double seconds);

}  // namespace espalier
