// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/hub_name.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <string_view>
#include <system_error>

namespace espalier {
namespace {

/// Letters, digits, '.', '_' and '-', beginning with a letter or digit.
bool is_word(std::string_view text) {
  const auto is_plain = [](unsigned char c) { return std::isalnum(c) != 0; };
  const auto may_follow = [&](unsigned char c) { return is_plain(c) || c == '.' || c == '_' || c == '-'; };
  return !text.empty() && is_plain(static_cast<unsigned char>(text.front())) &&
         std::all_of(text.begin(), text.end(), may_follow);
}

}  // namespace

std::string hub_advice(const std::filesystem::path& missing, HubKind kind) {
  const std::string text = missing.string();
  const size_t slash = text.find('/');
  if (slash == std::string::npos) return "";
  const std::string name = text.substr(slash + 1);
  std::error_code unknown;
  if (!is_word(text.substr(0, slash)) || !is_word(name)) return "";
  if (std::filesystem::exists(missing.parent_path(), unknown)) return "";
  const bool is_dataset = kind == HubKind::kDataset;
  return fmt::format(
      "; it looks like a {} of the Hugging Face Hub, which `hf download {}{} --local-dir {}` downloads",
      is_dataset ? "dataset" : "model", text, is_dataset ? " --repo-type dataset" : "", name);
}

}  // namespace espalier
