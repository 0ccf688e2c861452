// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/commands/command.h"

namespace espalier::cli {

std::vector<std::string> Command::flag_names() const {
  std::vector<std::string> names;
  for (const Option& option : options.all()) {
    if (!option.text().names.empty()) names.push_back(option.name());
  }
  if (has_config) names.emplace_back("config");
  names.emplace_back("help");
  return names;
}

}  // namespace espalier::cli
