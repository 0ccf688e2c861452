// SPDX-License-Identifier: Apache-2.0
// Adapters in PEFT folders: adapter_config.json and adapter_model.safetensors.
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
  Adapter adapter;      // with the config of the file
  LoraOptions options;  // targets: full names of its maps
  at::Tensor lm_head;   // the model's own, which PEFT saves beside an adapter of the head; may be undefined
};

/// Loads an adapter for a model in `dtype`. Throws InputError naming file and key or tensor if the config
/// requires anything but plain low-rank adapters of linear maps (other methods, DoRA, biases,
/// modules_to_save, rank or alpha patterns, initialisations that change the weights of the model); if a
/// tensor belongs to no map of the model, has another shape, or is missing; or if values are not finite.
SavedAdapter load_adapter(const std::filesystem::path& folder, const DecoderConfig& config,
                          at::ScalarType dtype, at::Device device = at::kCPU);

/// Loads an adapter for this decoder. Throws InputError also if the LM head in the file is not the decoder's.
SavedAdapter load_adapter(const std::filesystem::path& folder, const Decoder& decoder);

/// Loads the decoder of a model folder (model/weights/weights.h) with the adapter of a folder; "": none.
Decoder load_adapted(const std::filesystem::path& model, const std::filesystem::path& adapter,
                     at::ScalarType dtype, at::Device device = at::kCPU);

/// Throws InputError if the adapter has dropout, which training on trees does not support.
void check_no_dropout(const Adapter& adapter, const std::filesystem::path& folder);

/// adapter_config.json of a new adapter of these maps. `base`: the path from which PEFT loads the model.
nlohmann::ordered_json adapter_config(const LoraOptions& options, const std::vector<std::string>& targets,
                                      const std::string& base);

/// Writes the two files of an adapter of `spec`, with adapter.config unchanged and weights in `dtype`, into
/// the folder `out` (created if necessary; the caller makes the whole folder atomic). Throws NonFiniteError
/// if values are not finite in `dtype`.
void save_adapter(const ModelSpec& spec, const Adapter& adapter, const std::filesystem::path& out,
                  at::ScalarType dtype);

}  // namespace espalier
