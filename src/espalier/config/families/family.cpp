// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"

#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>

namespace espalier {

std::span<const ModelFamily* const> families() {
  static constexpr auto kFamilies = std::to_array<const ModelFamily*>({&kLlamaFamily,
                                                                       &kMistralFamily,
                                                                       &kMinistralFamily,
                                                                       &kMixtralFamily,
                                                                       &kOlmo2Family,
                                                                       &kOlmo3Family,
                                                                       &kSmolLm3Family,
                                                                       &kQwen2Family,
                                                                       &kQwen3Family,
                                                                       &kQwen35Family,
                                                                       &kQwen35MoeFamily,
                                                                       &kQwen3MoeFamily,
                                                                       &kQwen3NextFamily,
                                                                       &kGlm4MoeFamily,
                                                                       &kGptOssFamily,
                                                                       &kGraniteFamily,
                                                                       &kGraniteMoeHybridFamily,
                                                                       &kMamba2Family,
                                                                       &kNemotronHFamily,
                                                                       &kDeepseekV3Family,
                                                                       &kSeedOssFamily,
                                                                       &kErnie45Family,
                                                                       &kExaone4Family,
                                                                       &kPhi3Family,
                                                                       &kGemmaFamily,
                                                                       &kGemma2Family,
                                                                       &kGemma3Family});
  return kFamilies;
}

std::string_view bias_key(const DecoderConfig& config, std::string_view bias) {
  std::string_view rest = find_family(config.model_type)->bias_keys;
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(' '));
    rest.remove_prefix(std::min(entry.size() + 1, rest.size()));
    const size_t equals = entry.find('=');
    if (bias.starts_with(entry.substr(0, equals))) return entry.substr(equals + 1);
  }
  return {};
}

void read_biases(const ConfigReader& config, AttentionSpec* attention, DenseMlpSpec* mlp) {
  attention->bias = attention->output_bias = config.boolean("attention_bias", false);
  const bool mlp_bias = config.boolean("mlp_bias", false);
  if (mlp != nullptr) {
    mlp->bias = mlp_bias;
  } else if (mlp_bias) {
    config.refuse("mlp_bias", "false");
  }
}

void refuse_biases(const ConfigReader& config) {
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (config.boolean(key, false)) config.refuse(key, "false");
  }
}

void read_multipliers(const ConfigReader& config, AttentionSpec* attention, DecoderConfig* result) {
  attention->attention_multiplier = config.positive_number("attention_multiplier", 1);
  result->embedding_multiplier = config.positive_number("embedding_multiplier", 1);
  result->residual_multiplier = config.positive_number("residual_multiplier", 1);
  result->logits_scaling = config.positive_number("logits_scaling", 1);
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
