// SPDX-License-Identifier: Apache-2.0
// Sliding windows in a config.json: which layers have one.
#pragma once

#include <optional>
#include <vector>

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// What layer_types says, whose entries are "full_attention" and "sliding_attention": whether each layer
/// slides. Nothing where the key is absent. Throws InputError for other entries and where they are not one
/// per layer.
std::optional<std::vector<bool>> read_layer_types(const ConfigReader& config, int64_t num_hidden_layers);

/// Gives the layers of `result` for which `sliding` is true the window of sliding_window; throws InputError
/// where that is null then. `default_window`: Transformers' default for the window.
void set_sliding_layers(const ConfigReader& config, const std::vector<bool>& sliding, DecoderConfig* result,
                        int64_t default_window = 4096);

/// qwen2, qwen3: with use_sliding_window, the layers from max_window_layers on have the window, or those that
/// layer_types names. sliding_window alone says nothing.
void read_switched_window(const ConfigReader& config, DecoderConfig* result);

/// For families without windows.
void refuse_sliding_windows(const ConfigReader& config, int64_t num_hidden_layers);

}  // namespace espalier
