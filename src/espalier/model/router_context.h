// SPDX-License-Identifier: Apache-2.0
// Additional inputs and outputs of the routers of a mixture of experts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <vector>

#include "espalier/model/router_statistics.h"

namespace espalier {

/// Outputs of the routers of a pass for their R tokens, in layer order.
struct RouterRecord {
  std::vector<at::Tensor> logits;   // [R, experts], in the graph
  std::vector<at::Tensor> experts;  // [R, top_k] int64, ascending in each row
};

/// Inputs for T tokens.
struct RouterContext {
  /// [T, W] int64: experts that override the routers' choices: top_k per router (W = routers * top_k), or per
  /// layer (W = layers * top_k; layers without router are ignored). -1: the router chooses. Undefined:
  /// routers choose everywhere.
  at::Tensor routes = {};
  at::Tensor multiplicity = {};  // [T] float64: trajectories through the token, for statistics
  c10::intrusive_ptr<RouterStatistics> statistics{};  // null: none
  RouterRecord* record = nullptr;                     // if set, appended to
};

}  // namespace espalier
