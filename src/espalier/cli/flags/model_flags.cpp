// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/model_flags.h"

namespace espalier::cli {

void add_model(OptionList* list, std::string* model, const std::string& help) {
  list->add("model", model, help.empty() ? "Hugging Face model folder" : help,
            {.path = PathKind::kFolder, .group = kDataGroup, .required = help.empty()});
}

void add_profile(OptionList* list, std::string* trace, const std::string& which) {
  list->add("profile", trace,
            "Profile " + which +
                ": write a trace to this file, for chrome://tracing or ui.perfetto.dev, and print the "
                "time of each kind of work and the rate of a plain matrix product",
            {.path = PathKind::kFile, .group = kOutputGroup});
}

}  // namespace espalier::cli
