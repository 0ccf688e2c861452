// SPDX-License-Identifier: Apache-2.0
// Costs of a small decoder, for tests of plans that go by time and memory.
#pragma once

#include <vector>

#include "espalier/plan/layer_cost.h"
#include "espalier/plan/planner.h"
#include "espalier/plan/time_model.h"

namespace espalier::testing {

inline const ModelCost kSmallDecoder =
    model_cost({.hidden_size = 256,
                .vocab_size = 1000,
                .layers = std::vector<LayerSpec>(
                    4, {AttentionSpec{.num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 64},
                        DenseMlpSpec{.intermediate_size = 704}})});

inline PlanCosts small_decoder_costs() {
  PlanCosts costs;
  costs.time = assumed_time_model(kSmallDecoder);
  costs.memory.cost = kSmallDecoder;
  costs.memory.num_parameters = 3'600'000;
  return costs;
}

}  // namespace espalier::testing
