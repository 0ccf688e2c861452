// SPDX-License-Identifier: Apache-2.0
// Which optimiser.
#pragma once

#include <string>

#include "espalier/base/options.h"

namespace espalier {

enum class OptimizerKind { kAdamW, kSgd };

/// The options of --optimizer, and its words; `help` says what it is for.
void add_optimizer(OptimizerKind* optimizer, OptionList* list, const std::string& help);
std::string to_string(OptimizerKind optimizer);

}  // namespace espalier
