// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/router_shape.h"

namespace espalier {

RouterShape router_shape(const DecoderConfig& config) {
  if (config.moe_layers.empty()) return {};
  return {config.moe_layers, config.moe.num_experts, config.moe.num_experts_per_tok};
}

}  // namespace espalier
