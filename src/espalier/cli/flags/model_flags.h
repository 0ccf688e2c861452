// SPDX-License-Identifier: Apache-2.0
// Flags of models that commands share.
#pragma once

#include <string>

#include "espalier/base/options.h"

namespace espalier::cli {

/// --model.
void add_model(OptionList* list, std::string* model, const std::string& help);
/// The same, required.
void add_model(OptionList* list, std::string* model);

/// --profile; `which`: the step that it records.
void add_profile(OptionList* list, std::string* trace, const std::string& which);

/// Says on standard error which tensors of a model's files are none of the decoder's, if any. Throws where
/// one of them must not be passed over (carried_tensors).
void note_carried_tensors(const std::string& model);

}  // namespace espalier::cli
