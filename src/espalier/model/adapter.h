// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters of a decoder's linear maps (LoRA; config/lora.h).
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/config/lora.h"
#include "espalier/model/model.h"

namespace espalier {

inline constexpr const char* kLoraA = ".lora_A.weight";
inline constexpr const char* kLoraB = ".lora_B.weight";

/// Adds scale (x A^T) B^T to the maps that have an A [rank, in] and a B [out, rank] here. They are in the
/// dtype of sums: float32 beside a bfloat16 model, as PEFT has them by default.
struct Adapter {
  double scale = 0;
  std::vector<Parameter> parameters;   // NAME.lora_A.weight, NAME.lora_B.weight of each map in turn
  nlohmann::ordered_json config = {};  // adapter_config.json, as it is saved (model/weights/adapter_folder.h)
};

/// A decoder's weights with scale B A added to those of the adapter's maps, in float32 at least, and rounded
/// to their dtype once (as PEFT merges). Weights of other maps are shared with `weights`.
std::vector<Parameter> merged_weights(const std::vector<Parameter>& weights, const Adapter& adapter);

/// Throws c10::Error unless the parameters are those of maps of `spec`, in the order of a checkpoint, with
/// shapes that fit.
void check_adapter(const ModelSpec& spec, const Adapter& adapter);

}  // namespace espalier
