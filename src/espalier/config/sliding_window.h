// SPDX-License-Identifier: Apache-2.0
// Sliding windows in a config.json: which layers have one.
#pragma once

#include <optional>
#include <vector>

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// For each layer, whether layer_types has "sliding_attention" and not "full_attention". nullopt if the key
/// is absent. Throws InputError for other entries and unless there is one per layer.
std::optional<std::vector<bool>> read_layer_types(const ConfigReader& config, int64_t num_hidden_layers);

/// Whether sliding_window is absent, which is a default window in most families that have one, or not null.
bool has_window(const ConfigReader& config);

/// Sets the window of sliding_window on the layers of `result` for which `sliding` is true; throws InputError
/// if it is null then. `default_window`: Transformers' default for the window.
void set_sliding_layers(const ConfigReader& config, const std::vector<bool>& sliding, DecoderConfig* result,
                        int64_t default_window = 4096);

/// For qwen2 and qwen3: with use_sliding_window, the layers from max_window_layers on have the window, or
/// those that layer_types names. sliding_window alone has no effect.
void read_switched_window(const ConfigReader& config, DecoderConfig* result);

/// For families whose layers all have the window, unless sliding_window is null. `default_window` is the one
/// of files without the key; 0: none.
void read_common_window(const ConfigReader& config, int64_t default_window, DecoderConfig* result);

/// For families whose layers without layer_types have the window if `otherwise` is true. Without
/// `uses_window`, throws InputError if layer_types names one.
void read_window(const ConfigReader& config, bool uses_window, const std::vector<bool>& otherwise,
                 DecoderConfig* result);

/// For families without windows. Throws InputError if the file has one.
void refuse_sliding_windows(const ConfigReader& config, int64_t num_hidden_layers);

}  // namespace espalier
