// SPDX-License-Identifier: Apache-2.0
// Shared by implementations of gated_delta_rule share.
#pragma once

#include "espalier/ops/gated_delta/gated_delta.h"

namespace espalier::detail {

using DeltaResults = std::tuple<at::Tensor, at::Tensor>;  // out, states at the ends
/// Gradients of q, k, v, g, beta and states, in their dtypes.
using DeltaGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Checks ranks, shapes, dtypes and devices, but not the values of prev and ends.
void check_gated_delta_rule(const GatedDeltaRule& given);

/// x / sqrt(|x|^2 + 1e-6) over the last dimension, and the factor.
struct UnitRows {
  at::Tensor unit, inverse_length;
};
UnitRows unit_rows(const at::Tensor& x);

/// The gradient of x from that of the unit rows.
at::Tensor unit_rows_backward(const at::Tensor& grad, const UnitRows& rows);

}  // namespace espalier::detail

/// Composed of ATen operators, for any device; the fallback without our own kernels.
namespace espalier::composed {

detail::DeltaResults gated_delta_rule(const GatedDeltaRule& given);
detail::DeltaGradients gated_delta_rule_backward(const TensorOrNone& grad_out, const TensorOrNone& grad_ends,
                                                 const GatedDeltaRule& given);

}  // namespace espalier::composed
