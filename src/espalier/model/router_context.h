// SPDX-License-Identifier: Apache-2.0
// What the routers of a mixture of experts are given besides their inputs, and what they leave.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <vector>

#include "espalier/model/router_statistics.h"

namespace espalier {

/// What the routers of a pass made of their R tokens, in the order of the layers.
struct RouterRecord {
  std::vector<at::Tensor> logits;   // [R, experts], in the graph
  std::vector<at::Tensor> experts;  // [R, top_k] int64, ascending in each row
};

/// Of T tokens.
struct RouterContext {
  /// [T, W] int64: the experts that tokens go to, whatever their routers would choose: top_k for each router
  /// (W = routers * top_k), or for each layer, of which those without router are not read (W = layers *
  /// top_k). Where they are -1, routers choose. Undefined: routers choose everywhere.
  at::Tensor routes = {};
  at::Tensor multiplicity = {};                       // [T] float64: trajectories that pass, for statistics
  c10::intrusive_ptr<RouterStatistics> statistics{};  // null: none
  RouterRecord* record = nullptr;                     // appended to where it is set
};

}  // namespace espalier
