// SPDX-License-Identifier: Apache-2.0
// Formats --help: flags in groups, each with the placeholder of its value, its meaning and its default.
#pragma once

#include <span>
#include <string>

#include "espalier/cli/print/command_text.h"

namespace espalier::cli {

std::string help_of_command(const CommandText& command);

/// `texts`: the result of command_texts.
std::string help_of_program(std::span<const CommandText> texts);

}  // namespace espalier::cli
