// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/command.h"

#include "espalier/base/mapped_file_guard.h"

namespace espalier::commands {

void Command::set(const NamedTexts& texts) {
  try {
    for (const auto& [name, text] : texts) ESPALIER_ASSERT(options.find(name) != nullptr);
    options.set(texts);
  } catch (const InputError& error) {
    throw UsageError(error.what());
  }
}

Result Command::operator()(const NamedTexts& texts) {
  set(texts);
  for (const Option& option : options.all()) {
    if (option.text().required && !option.is_given()) {
      throw UsageError(fmt::format("--{} is required", option.name()));
    }
  }
  Result result = run(options);
  check_mapped_files();  // results computed from a truncated file are invalid
  return result;
}

}  // namespace espalier::commands
