// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/extra_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

namespace espalier {
namespace {

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> suffixes) {
  return std::any_of(suffixes.begin(), suffixes.end(),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

/// Tensors that follow from the config or are only used for inference.
bool is_harmless(std::string_view name) {
  return ends_with_any(
      name, {"rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.k_scale",
             "attn.v_scale", "k_proj.k_scale", "v_proj.v_scale", "kv_scale"});
}

bool is_adapter(std::string_view name) {
  constexpr auto kMarks =
      std::to_array<std::string_view>({"lora_", "loha_", "lokr_", "modules_to_save", "adapter"});
  return std::any_of(kMarks.begin(), kMarks.end(),
                     [&](std::string_view mark) { return name.find(mark) != std::string_view::npos; });
}

std::string no_such_parameter(const DecoderConfig& config) {
  return fmt::format("a {} model has no such parameter", config.model_type);
}

std::string reason_in_layer(const DecoderConfig& config, std::string_view part) {
  if (part.ends_with(".bias")) {
    if (part.starts_with("mlp.")) return "config.json says that mlp_bias is false";
    const AttentionSpec* attention = config.attention();
    if (part == "self_attn.o_proj.bias" && attention != nullptr && attention->bias)
      return fmt::format("a {} model has no bias there", config.model_type);
    if (part.starts_with("self_attn.")) return "config.json says that attention_bias is false";
  }
  if (ends_with_any(part, {"q_norm.weight", "k_norm.weight"}))
    return fmt::format("config.json says that the model is a {}, which has no norms of queries and keys",
                       config.model_type);
  return no_such_parameter(config);
}

}  // namespace

std::optional<std::string> reason_to_refuse(const DecoderConfig& config, const std::string& tensor) {
  if (is_adapter(tensor)) return "it belongs to an adapter, which must be merged into the weights first";
  if (is_harmless(tensor)) return std::nullopt;
  const std::string layers = config.parameter_prefix + "layers.";
  if (tensor.starts_with(layers)) {
    int64_t layer = -1;
    const char* const end = tensor.data() + tensor.size();
    const auto [last, error] = std::from_chars(tensor.data() + layers.size(), end, layer);
    if (error != std::errc() || last == end || *last != '.') return no_such_parameter(config);
    const int64_t behind = layer - config.num_hidden_layers();
    if (behind >= 0 && behind < config.num_prediction_layers) return std::nullopt;
    if (layer < 0 || behind >= 0)
      return fmt::format("config.json says that num_hidden_layers is {}", config.num_hidden_layers());
    return reason_in_layer(config, std::string_view(last + 1, end));
  }
  for (const std::string& own :
       {config.parameter_prefix + config.embedding_name + ".",
        config.parameter_prefix + config.final_norm_name + ".", std::string("lm_head.")}) {
    if (tensor.starts_with(own)) return no_such_parameter(config);
  }
  return std::nullopt;
}

}  // namespace espalier
