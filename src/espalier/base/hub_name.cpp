// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/hub_name.h"

#include <fmt/format.h>

#include <regex>
#include <system_error>

namespace espalier {

std::string hub_advice(const std::filesystem::path& missing, HubKind kind) {
  static const std::regex form("[A-Za-z0-9][A-Za-z0-9._-]*/([A-Za-z0-9][A-Za-z0-9._-]*)");
  const std::string name = missing.string();
  std::smatch match;
  std::error_code unknown;
  if (!std::regex_match(name, match, form) || std::filesystem::exists(missing.parent_path(), unknown))
    return "";
  const bool is_dataset = kind == HubKind::kDataset;
  return fmt::format(
      "; it reads like a {} of the Hugging Face Hub, which `hf download {}{} --local-dir {}` downloads",
      is_dataset ? "dataset" : "model", name, is_dataset ? " --repo-type dataset" : "", match[1].str());
}

}  // namespace espalier
