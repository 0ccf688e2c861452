// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/router_shape.h"

namespace espalier {

RouterShape router_shape(const ModelSpec& spec) {
  RouterShape shape;
  for (int64_t i = 0; i < spec.num_hidden_layers(); ++i) {
    const auto* moe = std::get_if<MoeSpec>(&spec.layers[i].mlp);
    if (moe == nullptr) continue;
    shape.layers.push_back(i);
    shape.experts = moe->num_experts;
    shape.top_k = moe->num_experts_per_tok;
  }
  return shape;
}

}  // namespace espalier
