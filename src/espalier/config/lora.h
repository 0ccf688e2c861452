// SPDX-License-Identifier: Apache-2.0
// Which linear maps of a model get low-rank adapters (LoRA), and of what size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/config/layer_spec.h"

namespace espalier {

class OptionList;

/// Of every linear map that may have an adapter.
inline constexpr const char* kAllLinear = "all-linear";

/// A map x W^T with an adapter is x W^T + scale (x A^T) B^T, W frozen (Hu et al., LoRA, 2021, section 4.1).
struct LoraOptions {
  int64_t rank = 0;
  double alpha = 0;
  bool rslora = false;
  /// Names of maps, or kAllLinear alone. A name stands for all maps that are called so or whose names end
  /// with it behind a dot: "q_proj", "self_attn.q_proj", "layers.3.self_attn.q_proj" (as in PEFT).
  std::vector<std::string> targets = {};

  bool operator==(const LoraOptions&) const = default;
};

/// Of a new adapter: --lora-rank and what goes with it. Without alpha, that is 0.
void add_lora_options(LoraOptions* options, OptionList* list);

/// alpha / rank; with rslora alpha / sqrt(rank) (Kalajdzievski, A rank stabilization scaling factor, 2023).
double lora_scale(const LoraOptions& options);

/// Throws InputError naming an option that is out of its range: rank at least 1, alpha finite and above 0, at
/// least one target.
void check_lora_options(const LoraOptions& options);

/// A linear map [out, in] by its module's name in the checkpoint: "model.layers.0.self_attn.q_proj".
struct LinearMap {
  std::string name;
  int64_t in = 0;
  int64_t out = 0;
};

/// The maps of layers that may have an adapter, in the order of a checkpoint: all that PEFT can adapt as
/// linear modules of Transformers. These are not routers, experts and convolutions; nor, in models with
/// experts, others that are called gate_proj, up_proj or down_proj; nor the output projection of mamba2.
/// Embedding and LM head have none.
std::vector<LinearMap> adaptable_maps(const ModelSpec& spec);

/// Of these, the maps of `targets`. Throws InputError naming a target that stands for no map, or also for one
/// that may not have an adapter, and the names that there are.
std::vector<LinearMap> adapted_maps(const ModelSpec& spec, const std::vector<std::string>& targets);

/// Names for `maps`, each once, by which PEFT finds them and nothing else in the model: their last part
/// ("q_proj"), or where this also names what has no adapter, longer ones ("mlp.shared_expert.gate_proj", or
/// the whole name).
std::vector<std::string> target_names(const ModelSpec& spec, const std::vector<LinearMap>& maps);

}  // namespace espalier
