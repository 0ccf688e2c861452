// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "espalier/base/output.h"
#include "espalier/base/printable.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/model/weights/weights.h"

namespace espalier::cli {

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
