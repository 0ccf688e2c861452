// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/config_text.h"

#include "espalier/base/check.h"
#include "espalier/base/printable.h"

namespace espalier::commands {

nlohmann::ordered_json resolved_options(const OptionList& options) {
  auto values = nlohmann::ordered_json::object();
  for (const Option& option : options.all()) {
    if (nlohmann::ordered_json value = option.kept(); !value.is_null()) {
      values[option.name()] = std::move(value);
    }
  }
  return values;
}

std::string to_toml(const nlohmann::ordered_json& values) {
  std::string text;
  for (const auto& [key, value] : values.items()) {
    for (const auto& element : value.is_array() ? value : nlohmann::ordered_json::array({value})) {
      const auto* content = element.get_ptr<const std::string*>();
      ESPALIER_CHECK(content == nullptr || is_utf8(*content),
                     "--{}: expected UTF-8 text, which TOML requires, received {}", key, *content);
    }
    text += fmt::format("{} = {}\n", key, value.dump());
  }
  return text;
}

}  // namespace espalier::commands
