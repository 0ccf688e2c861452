// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/command.h"

#include <array>

#include "espalier/base/mapped_file_guard.h"

namespace espalier::commands {

void Command::set(const NamedTexts& texts) {
  try {
    for (const auto& [name, text] : texts) {
      ESPALIER_CHECK(options.find(name) != nullptr, "unknown option {}", name);
    }
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

nlohmann::ordered_json Command::description() const {
  auto all = nlohmann::ordered_json::array();
  constexpr std::array kPaths{"", "file", "folder"};
  for (const Option& option : options.all()) {
    const OptionText& text = option.text();
    all.push_back({{"name", option.name()},
                   {"names", text.names},
                   {"value", text.value},
                   {"words", text.words},
                   {"default", text.default_value},
                   {"group", text.group},
                   {"path", kPaths.at(static_cast<size_t>(text.path))},
                   {"required", text.required},
                   {"several", option.is_list()},
                   {"hidden", option.traits().hidden},
                   {"help", text.help}});
  }
  return all;
}

}  // namespace espalier::commands
