// SPDX-License-Identifier: Apache-2.0
// What plans for a model depend on beside the flags.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "espalier/config/config.h"
#include "espalier/config/lora.h"
#include "espalier/objective/mix.h"
#include "espalier/plan/cost_model.h"

namespace espalier {

/// A model, and how it is run.
struct ModelUse {
  DecoderConfig config;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;  // open
  int64_t optimizer_bytes = 0;   // that an optimiser keeps for each element of a parameter
  ObjectiveOptions objective{};
  std::vector<MixSource> mix{};       // in place of the objective, where there are any
  std::optional<LoraOptions> lora{};  // of adapters that are trained in place of the weights
  int64_t ref_topk = 0;               // of the trajectories

  /// With the adapters.
  ModelCost cost() const;
};

}  // namespace espalier
