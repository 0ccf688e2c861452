// SPDX-License-Identifier: Apache-2.0
// Options as the text of a TOML file, which a run stores.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "espalier/base/options.h"

namespace espalier::commands {

/// All options with their resolved values (Option::kept).
nlohmann::ordered_json resolved_options(const OptionList& options);

/// A line for each value. Throws InputError for text that is not UTF-8, such as some file names.
std::string to_toml(const nlohmann::ordered_json& values);

}  // namespace espalier::commands
