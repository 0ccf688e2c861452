// SPDX-License-Identifier: Apache-2.0
// The kinds of optimisers.
#pragma once

#include <string>

#include "espalier/base/options.h"

namespace espalier {

enum class OptimizerKind { kAdamW, kSgd };

/// Adds the option --optimizer.
void add_optimizer(OptimizerKind* optimizer, OptionList* list, const std::string& help);
std::string to_string(OptimizerKind optimizer);

}  // namespace espalier
