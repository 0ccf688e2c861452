// SPDX-License-Identifier: Apache-2.0
// Checks of the values of flags, with messages that say what was expected and received.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "espalier/base/check.h"

namespace espalier::cli {

/// Turns a size such as 8GiB into bytes. Numbers without a unit below `fewest_bare` are refused: there the
/// unit was forgotten.
CLI::Validator byte_size(int64_t fewest_bare = 0);
/// Checks that a flag is a whole number from `low` on.
CLI::Validator whole_from(int64_t low);
/// Makes the parser refuse whole numbers that are not written in plain decimal digits, or do not fit, for all
/// flags of a command that are whole numbers: CLI11 takes 010 for 8 and 0x10 for 16, and the largest number
/// for any beyond it.
void require_decimal_numbers(CLI::App* command);
/// Checks that a flag is a number from `low` on, up to `high`, and neither NaN nor infinite.
CLI::Validator real_from(double low, double high = std::numeric_limits<double>::max());
/// The same with `high` itself left out.
CLI::Validator real_below(double low, double high);

/// What is wrong with the text of a flag, as CLI11 wants it: the message of the InputError that `parse`
/// throws.
template <class Parse>
std::function<std::string(const std::string&)> fault_of(Parse parse) {
  return [parse](const std::string& text) {
    try {
      parse(text);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
}

}  // namespace espalier::cli
