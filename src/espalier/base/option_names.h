// SPDX-License-Identifier: Apache-2.0
// How messages name options: as flags of commands, or as arguments of Python.
#pragma once

#include <string>
#include <string_view>

namespace espalier {

enum class OptionNames { kFlags, kArguments };

/// From now on messages of this library that use `named` name options so; at first as flags. What commands
/// alone say has flags in any case.
void name_options_as(OptionNames names);

/// "--token-budget", or "token_budget" as an argument; with a value "--strategy partition", or
/// `strategy="partition"`.
std::string named(std::string_view option, std::string_view value = "");

}  // namespace espalier
