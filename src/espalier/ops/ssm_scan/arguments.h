// SPDX-License-Identifier: Apache-2.0
// Shared by implementations of ssm_scan share.
#pragma once

#include "espalier/ops/ssm_scan/ssm_scan.h"

namespace espalier::detail {

using SsmResults = std::tuple<at::Tensor, at::Tensor>;  // out, states at the ends
/// Gradients of x, dt, A, B, C, D and states, in their dtypes.
using SsmGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Checks ranks, shapes, dtypes and devices, but not the values of prev and ends.
void check_ssm_scan(const SsmScan& given);

/// Gradients in the accumulator dtype: of v = dt x [T, H, P], of g = dt A [T, H], of B, C and states.
struct SsmRowGradients {
  at::Tensor v, g, b, c, states;
};

/// The resulting gradients of the arguments; `grad_out` in the accumulator dtype.
SsmGradients ssm_gradients(const SsmScan& given, const at::Tensor& grad_out, const SsmRowGradients& rows);

}  // namespace espalier::detail

/// Composed of ATen operators, for any device; the fallback without our own kernels.
namespace espalier::composed {

detail::SsmResults ssm_scan(const SsmScan& given);
detail::SsmGradients ssm_scan_backward(const TensorOrNone& grad_out, const TensorOrNone& grad_ends,
                                       const SsmScan& given);

}  // namespace espalier::composed
