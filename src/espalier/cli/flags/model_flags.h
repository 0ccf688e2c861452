// SPDX-License-Identifier: Apache-2.0
// Flags for models, shared by commands.
#pragma once

#include <string>

#include "espalier/base/options.h"

namespace espalier::cli {

/// Adds --model, which is required unless `help` says what is used without it.
void add_model(OptionList* list, std::string* model, const std::string& help = "");

/// Adds --profile; `which` names the step that it records.
void add_profile(OptionList* list, std::string* trace, const std::string& which);

/// Prints on standard error which tensors of a model's files the decoder does not use, if any. Throws if one
/// of them must not be ignored (carried_tensors).
void note_carried_tensors(const std::string& model);

}  // namespace espalier::cli
