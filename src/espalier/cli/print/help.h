// SPDX-License-Identifier: Apache-2.0
// How --help looks: flags in groups, each with what stands for its value, its meaning and its default.
#pragma once

#include <span>
#include <string>

#include "espalier/cli/print/command_text.h"

namespace espalier::cli {

std::string help_of_command(const CommandText& command);

/// `texts`: as command_texts has them.
std::string help_of_program(std::span<const CommandText> texts);

}  // namespace espalier::cli
