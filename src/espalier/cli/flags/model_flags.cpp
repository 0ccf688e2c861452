// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/model_flags.h"

#include <algorithm>
#include <vector>

#include "espalier/base/output.h"
#include "espalier/base/printable.h"
#include "espalier/model/weights/weights.h"

namespace espalier::cli {

void add_model(OptionList* list, std::string* model, const std::string& help) {
  list->add("model", model, help, {.path = PathKind::kFolder, .group = kDataGroup});
}

void add_model(OptionList* list, std::string* model) {
  list->add("model", model, "Hugging Face model folder",
            {.path = PathKind::kFolder, .group = kDataGroup, .required = true});
}

void add_profile(OptionList* list, std::string* trace, const std::string& which) {
  list->add("profile", trace,
            "Profile " + which +
                ": write a trace to this file, for chrome://tracing or ui.perfetto.dev, and print the "
                "time of each kind of work and the rate of a plain matrix product",
            {.path = PathKind::kFile, .group = kOutputGroup});
}

void note_carried_tensors(const std::string& model) {
  const std::vector<std::string> names = carried_tensors(model);
  if (names.empty()) return;
  constexpr size_t kMost = 5;
  std::string list;
  for (size_t i = 0; i < std::min(kMost, names.size()); ++i)
    list += (i > 0 ? ", " : "") + shortened(names[i]);
  if (names.size() > kMost) list += fmt::format(" and {} more", names.size() - kMost);
  log_line("{}: tensors that the model does not use and checkpoints carry unchanged: {}", printable(model),
           list);
}

}  // namespace espalier::cli
