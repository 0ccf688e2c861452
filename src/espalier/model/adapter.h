// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters of a decoder's linear maps (LoRA; config/lora.h).
#pragma once

#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/config/lora.h"
#include "espalier/model/model.h"

namespace espalier {

inline constexpr const char* kLoraA = ".lora_A.weight";
inline constexpr const char* kLoraB = ".lora_B.weight";

/// Adds scale (x A^T) B^T to linear maps with matrices A [rank, in] and B [out, rank]. They are in the
/// accumulator dtype: float32 for a bfloat16 model, the default of PEFT.
struct Adapter {
  double scale = 0;
  std::vector<Parameter> parameters;   // NAME.lora_A.weight, NAME.lora_B.weight for each map
  nlohmann::ordered_json config = {};  // adapter_config.json (model/weights/adapter_folder.h)
};

/// Dtype of what is trained of a model in `dtype`: the weights, or an adapter.
at::ScalarType trained_dtype(at::ScalarType dtype, bool has_adapter);

/// Merges the adapter: adds scale B A to the weights of its maps, in float32 at least, and rounds them to
/// their dtype once (as PEFT does). Other weights share storage with `weights`.
std::vector<Parameter> merged_weights(const std::vector<Parameter>& weights, const Adapter& adapter);

/// Throws c10::Error unless the parameters belong to maps of `spec`, in checkpoint order, with matching
/// shapes.
void check_adapter(const ModelSpec& spec, const Adapter& adapter);

}  // namespace espalier
