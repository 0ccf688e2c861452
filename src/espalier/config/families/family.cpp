// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

namespace espalier {

std::span<const ModelFamily* const> families() {
  static constexpr const ModelFamily* kFamilies[] = {
      &kLlamaFamily,  &kMistralFamily,          &kOlmo3Family,    &kQwen2Family,     &kQwen3Family,
      &kQwen35Family, &kQwen35MoeFamily,        &kQwen3MoeFamily, &kQwen3NextFamily, &kGlm4MoeFamily,
      &kGptOssFamily, &kGraniteMoeHybridFamily, &kMamba2Family};
  return kFamilies;
}

void read_biases(const ConfigReader& config, AttentionSpec* attention) {
  attention->bias = attention->output_bias = config.boolean("attention_bias", false);
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false");
}

const ModelFamily* find_family(const std::string& model_type) {
  const auto is_it = [&](const ModelFamily* family) {
    return family->model_type == model_type || (!model_type.empty() && family->composite_type == model_type);
  };
  const auto found = std::ranges::find_if(families(), is_it);
  return found == families().end() ? nullptr : *found;
}

std::string family_names(const std::string& conjunction, const std::string& quote) {
  std::vector<std::string> types;
  for (const ModelFamily* family : families()) {
    types.emplace_back(family->model_type);
    if (*family->composite_type != '\0') types.emplace_back(family->composite_type);
  }
  std::string names;
  for (const std::string& type : types) {
    const std::string separator = &type == &types.back() ? fmt::format(" {} ", conjunction) : ", ";
    if (!names.empty()) names += separator;
    names += fmt::format("{}{}{}", quote, type, quote);
  }
  return names;
}

}  // namespace espalier
