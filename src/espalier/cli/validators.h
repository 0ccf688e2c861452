// SPDX-License-Identifier: Apache-2.0
// Checks of the values of flags, with messages that say what was expected and received.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <limits>

namespace espalier::cli {

/// Turns a size such as 8GiB into bytes. Numbers without a unit below `fewest_bare` are refused: there the
/// unit was forgotten.
CLI::Validator byte_size(int64_t fewest_bare = 0);
/// Checks that a flag is a whole number from `low` on.
CLI::Validator whole_from(int64_t low);
/// Checks that a flag is a number from `low` on, up to `high`, and neither NaN nor infinite.
CLI::Validator real_from(double low, double high = std::numeric_limits<double>::max());
/// The same with `high` itself left out.
CLI::Validator real_below(double low, double high);

}  // namespace espalier::cli
