// SPDX-License-Identifier: Apache-2.0
// What implementations of ssm_scan share.
#pragma once

#include "espalier/ops/ssm_scan/ssm_scan.h"

namespace espalier::detail {

using SsmResults = std::tuple<at::Tensor, at::Tensor>;  // out, states at the ends
/// Of x, dt, A, B, C, D and states, in their dtypes.
using SsmGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Ranks, shapes, dtypes and devices; not the values of prev and ends.
void check_ssm_scan(const SsmScan& given);

/// Gradients in the dtype of sums: of v = dt x [T, H, P], of g = dt A [T, H], of B, C and states.
struct SsmRowGradients {
  at::Tensor v, g, b, c, states;
};

/// What follows from them; `grad_out` in the dtype of sums.
SsmGradients ssm_gradients(const SsmScan& given, const at::Tensor& grad_out, const SsmRowGradients& rows);

}  // namespace espalier::detail

/// As a composition of ATen's operators, on any device: what runs where there are no kernels of ours.
namespace espalier::composed {

detail::SsmResults ssm_scan(const SsmScan& given);
detail::SsmGradients ssm_scan_backward(const TensorOrNone& grad_out, const TensorOrNone& grad_ends,
                                       const SsmScan& given);

}  // namespace espalier::composed
