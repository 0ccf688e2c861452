// SPDX-License-Identifier: Apache-2.0
// Models of equal layers, for tests of cost models.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/layer_cost.h"

namespace espalier::testing {

/// Sizes under the names of a Hugging Face config.json.
struct UniformModel {
  int64_t num_hidden_layers = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
};

inline ModelSpec spec_of(const UniformModel& model) {
  const LayerSpec layer{AttentionSpec{.num_attention_heads = model.num_attention_heads,
                                      .num_key_value_heads = model.num_key_value_heads,
                                      .head_dim = model.head_dim},
                        DenseMlpSpec{.intermediate_size = model.intermediate_size}};
  return {.hidden_size = model.hidden_size,
          .vocab_size = model.vocab_size,
          .layers = std::vector<LayerSpec>(model.num_hidden_layers, layer)};
}

inline ModelCost cost_of(const UniformModel& model) {
  return model_cost(spec_of(model));
}

}  // namespace espalier::testing
