// SPDX-License-Identifier: Apache-2.0
// The routers of a model's mixtures of experts.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/config/layer_spec.h"

namespace espalier {

/// The routers of a model: each sends a token to `top_k` of `experts`.
struct RouterShape {
  std::vector<int64_t> layers;  // layers with a router, ascending; empty: a model without experts
  int64_t experts = 0;
  int64_t top_k = 0;

  int64_t count() const { return static_cast<int64_t>(layers.size()); }
};

RouterShape router_shape(const ModelSpec& spec);

}  // namespace espalier
