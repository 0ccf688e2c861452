// SPDX-License-Identifier: Apache-2.0
// Checks of shapes, dtypes, devices and options for router and experts.
#pragma once

#include "espalier/ops/moe/moe.h"

namespace espalier::detail {

void check_route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
                 const RouterOptions& options);

/// Checks the `experts` argument of route, but not its values.
void check_routes(const at::Tensor& logits, const at::Tensor& experts, int64_t top_k);

/// Does not check the values of routing.experts.
void check_moe(const at::Tensor& x, const Routing& routing);
void check_moe_experts(const at::Tensor& x, const ExpertWeights& experts);

}  // namespace espalier::detail
