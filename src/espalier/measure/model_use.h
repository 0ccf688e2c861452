// SPDX-License-Identifier: Apache-2.0
// The model of a plan, and the settings it runs with.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "espalier/config/config.h"
#include "espalier/config/lora.h"
#include "espalier/engine/cost.h"
#include "espalier/objective/mix.h"
#include "espalier/plan/cost_model.h"

namespace espalier {

/// A model and the settings it runs with.
struct ModelUse {
  DecoderConfig config;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;  // open
  double optimizer_bytes = 0;    // optimiser state per element of a trained parameter
  ObjectiveOptions objective{};
  std::vector<MixSource> mix{};       // if not empty, used in place of the objective
  std::optional<LoraOptions> lora{};  // adapters trained in place of the weights
  HeadDemand demand{};                // of the rows
  int64_t context_parallel = 1;       // MemoryModel::context_parallel

  /// The cost of the model including adapters.
  ModelCost cost() const;
};

}  // namespace espalier
