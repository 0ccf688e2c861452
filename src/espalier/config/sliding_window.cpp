// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/sliding_window.h"

#include <algorithm>

#include <fmt/format.h>

namespace espalier {
namespace {

constexpr int64_t kDefaultMaxWindowLayers = 28;

}  // namespace

bool has_window(const ConfigReader& config) {
  return !config.has("sliding_window") || config.find("sliding_window") != nullptr;
}

std::optional<std::vector<bool>> read_layer_types(const ConfigReader& config, int64_t num_hidden_layers) {
  const nlohmann::json* types = config.find("layer_types");
  if (types == nullptr) return std::nullopt;
  std::vector<bool> sliding;
  for (const nlohmann::json& type : *types) {
    if (type == "full_attention" || type == "sliding_attention")
      sliding.push_back(type == "sliding_attention");
  }
  const bool fits = types->is_array() && sliding.size() == types->size() &&
                    static_cast<int64_t>(sliding.size()) == num_hidden_layers;
  if (!fits) {
    config.refuse("layer_types",
                  fmt::format("{} times \"full_attention\" or \"sliding_attention\"", num_hidden_layers));
  }
  return sliding;
}

void set_sliding_layers(const ConfigReader& config, const std::vector<bool>& sliding, DecoderConfig* result,
                        int64_t default_window) {
  if (std::ranges::find(sliding, true) == sliding.end()) return;
  if (config.has("sliding_window") && config.find("sliding_window") == nullptr) {
    config.refuse("sliding_window", "the window of the layers that layer_types calls \"sliding_attention\"");
  }
  const int64_t window = config.positive_integer("sliding_window", kMostPositions, default_window);
  for (size_t i = 0; i < sliding.size(); ++i) {
    if (sliding[i]) std::get<AttentionSpec>(result->layers.at(i).mixer).sliding_window = window;
  }
}

void read_switched_window(const ConfigReader& config, DecoderConfig* result) {
  const bool uses_window = config.boolean("use_sliding_window", false) && has_window(config);
  std::vector<bool> otherwise(result->num_hidden_layers());
  if (uses_window && config.find("layer_types") == nullptr) {
    const int64_t first = config.integer_from_0("max_window_layers", kMostLayers, kDefaultMaxWindowLayers);
    for (int64_t i = first; i < result->num_hidden_layers(); ++i) otherwise[i] = true;
  }
  read_window(config, uses_window, otherwise, result);
}

void read_window(const ConfigReader& config, bool uses_window, const std::vector<bool>& otherwise,
                 DecoderConfig* result) {
  const std::optional<std::vector<bool>> given = read_layer_types(config, result->num_hidden_layers());
  if (uses_window) {
    set_sliding_layers(config, given.value_or(otherwise), result);
  } else if (given && std::ranges::find(*given, true) != given->end()) {
    config.refuse("layer_types", "\"full_attention\" alone without use_sliding_window and sliding_window");
  }
}

void read_common_window(const ConfigReader& config, int64_t default_window, DecoderConfig* result) {
  if (config.find("use_sliding_window") != nullptr) {
    config.refuse("use_sliding_window",
                  fmt::format("no such key: sliding_window alone decides in {}", result->model_type));
  }
  const bool all = default_window > 0 ? has_window(config) : config.find("sliding_window") != nullptr;
  const std::vector<bool> sliding(result->num_hidden_layers(), all);
  if (read_layer_types(config, result->num_hidden_layers()).value_or(sliding) != sliding) {
    config.refuse("layer_types", all ? "\"sliding_attention\" for every layer, as sliding_window is given"
                                     : "\"full_attention\" for every layer, as sliding_window is null");
  }
  set_sliding_layers(config, sliding, result, default_window);
}

void refuse_sliding_windows(const ConfigReader& config, int64_t num_hidden_layers) {
  if (config.boolean("use_sliding_window", false)) config.refuse("use_sliding_window", "false");
  // Models with use_sliding_window ignore the window if it is false.
  if (config.find("sliding_window") != nullptr && config.find("use_sliding_window") == nullptr) {
    config.refuse("sliding_window", "null");
  }
  const std::optional<std::vector<bool>> sliding = read_layer_types(config, num_hidden_layers);
  if (sliding && std::ranges::find(*sliding, true) != sliding->end()) {
    config.refuse("layer_types", fmt::format("{} times \"full_attention\"", num_hidden_layers));
  }
}

}  // namespace espalier
