// SPDX-License-Identifier: Apache-2.0
// Checks of what the router and the experts are given: shapes, dtypes, devices and options.
#pragma once

#include "espalier/ops/moe/moe.h"

namespace espalier::detail {

void check_route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
                 const RouterOptions& options);

/// The experts that route is given; not their values.
void check_routes(const at::Tensor& logits, const at::Tensor& experts, int64_t top_k);

/// Not the values of the routing's experts.
void check_moe(const at::Tensor& x, const Routing& routing);
void check_moe_experts(const at::Tensor& x, const ExpertWeights& experts);

}  // namespace espalier::detail
