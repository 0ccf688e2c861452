// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/common_costs.h"

namespace espalier {

PlanCosts common_costs() {
  const LayerSpec layer{AttentionSpec{.num_attention_heads = 16, .num_key_value_heads = 8, .head_dim = 128},
                        DenseMlpSpec{.intermediate_size = 3072}};
  const ModelCost common =
      model_cost({.hidden_size = 1024, .vocab_size = 151'936, .layers = std::vector<LayerSpec>(28, layer)});
  return {assumed_time_model(common), {.cost = common}};
}

}  // namespace espalier
