// SPDX-License-Identifier: Apache-2.0
// Adapters as folders of PEFT: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/config/config.h"
#include "espalier/model/adapter.h"
#include "espalier/model/decoder.h"

namespace espalier {

inline constexpr const char* kAdapterConfigFile = "adapter_config.json";
inline constexpr const char* kAdapterWeightsFile = "adapter_model.safetensors";

struct SavedAdapter {
  Adapter adapter;      // its config as it stands in the file
  LoraOptions options;  // targets: the whole names of its maps
};

/// Reads an adapter for a model in `dtype`. Throws InputError naming file and key or tensor: where the config
/// asks for anything but plain low-rank adapters of linear maps (other methods, DoRA, biases, further modules
/// saved whole, ranks or alphas by pattern, initialisations that changed the weights of the model); where a
/// tensor is of no map of the model, has another shape, or is missing; and where values are not finite.
SavedAdapter load_adapter(const std::filesystem::path& folder, const DecoderConfig& config,
                          at::ScalarType dtype, at::Device device = at::kCPU);

/// The decoder of a model folder (model/weights/weights.h) with the adapter of a folder; without one where
/// that is
/// "".
Decoder load_adapted(const std::filesystem::path& model, const std::filesystem::path& adapter,
                     at::ScalarType dtype, at::Device device = at::kCPU);

/// Throws InputError where the adapter was trained with dropout, which training on trees cannot have.
void check_no_dropout(const SavedAdapter& adapter, const std::filesystem::path& folder);

/// adapter_config.json of a new adapter of these maps. `base`: what PEFT is to load the model from.
nlohmann::ordered_json adapter_config(const LoraOptions& options, const std::vector<std::string>& targets,
                                      const std::string& base);

/// Writes the two files, adapter.config as it is, into the folder `out` (made if absent; the caller makes the
/// whole folder atomic), the weights in `dtype`. Throws NonFiniteError where they are not finite in it.
void save_adapter(const Adapter& adapter, const std::filesystem::path& out, at::ScalarType dtype);

}  // namespace espalier
