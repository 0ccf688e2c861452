// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters (LoRA): options, and which linear maps of a model have them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/config/layer_spec.h"

namespace espalier {

class OptionList;

/// Target that selects every linear map that can have an adapter but the LM head, as in PEFT.
inline constexpr const char* kAllLinear = "all-linear";

/// The module of the LM head, also of a model whose head is its embedding.
inline constexpr const char* kHeadModule = "lm_head";

/// A map x W^T with an adapter is x W^T + scale (x A^T) B^T, W frozen (Hu et al., LoRA, 2021, section 4.1).
struct LoraOptions {
  int64_t rank = 0;
  double alpha = 0;
  bool rslora = false;
  /// Names of maps, or kAllLinear. A name selects all maps of this name or with this suffix after a dot:
  /// "q_proj", "self_attn.q_proj", "layers.3.self_attn.q_proj" (as in PEFT).
  std::vector<std::string> targets = {};

  bool operator==(const LoraOptions&) const = default;
};

/// Adds the options of a new adapter: --lora-rank and related ones. Without --lora-alpha, alpha is 0.
void add_lora_options(LoraOptions* options, OptionList* list);

/// alpha / rank; with rslora alpha / sqrt(rank) (Kalajdzievski, A rank stabilization scaling factor, 2023).
double lora_scale(const LoraOptions& options);

/// Throws InputError unless rank is at least 1, alpha is finite and above 0, and there is at least one
/// target.
void check_lora_options(const LoraOptions& options);

/// A linear map [out, in] and its module's name in the checkpoint: "model.layers.0.self_attn.q_proj".
struct LinearMap {
  std::string name;
  int64_t in = 0;
  int64_t out = 0;
};

/// The maps that can have an adapter, in the order of a checkpoint: all linear modules of layers that PEFT
/// can adapt in Transformers, and the LM head. This excludes routers, experts, convolutions and embedding; in
/// models whose experts are named gate_proj, up_proj and down_proj, other maps of these names; and the output
/// projections of mamba2 and nemotron_h.
std::vector<LinearMap> adaptable_maps(const ModelSpec& spec);

/// The name in Transformers, and so in PEFT, of a module (or of a tensor in it) with this name in the
/// checkpoint.
std::string module_name(const ModelSpec& spec, const std::string& name);

/// The adaptable maps that `targets` select. Throws InputError naming a target that selects no map or also
/// one that cannot have an adapter, and the possible names.
std::vector<LinearMap> adapted_maps(const ModelSpec& spec, const std::vector<std::string>& targets);

/// Distinct names by which PEFT finds exactly `maps` in the model: their last component ("q_proj"), or, if
/// that also matches modules without an adapter, longer suffixes ("mlp.shared_expert.gate_proj", or the whole
/// name in Transformers).
std::vector<std::string> target_names(const ModelSpec& spec, const std::vector<LinearMap>& maps);

}  // namespace espalier
