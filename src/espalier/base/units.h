// SPDX-License-Identifier: Apache-2.0
// Numbers formatted for people.
#pragma once

#include <cstdint>
#include <string>

namespace espalier {

/// "1,234,567".
std::string with_commas(int64_t value);
/// "1.5 GiB".
std::string human_bytes(double bytes);
/// "2m 05s".
std::string human_seconds(double seconds);

}  // namespace espalier
