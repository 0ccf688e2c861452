// SPDX-License-Identifier: Apache-2.0
// Shared by implementations of causal_conv1d share.
#pragma once

#include "espalier/ops/causal_conv1d/causal_conv1d.h"

namespace espalier::detail {

/// Checks ranks, shapes, dtypes and devices, but not the values of prev.
void check_causal_conv1d(const CausalConv1d& given);

/// The rows numbered by ConvolutionRows (taps.h), [1 + N (W - 1) + T, C]. Differentiable.
at::Tensor convolution_rows(const at::Tensor& x, const at::Tensor& tails);

using ConvolutionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // x, weight, bias, tails

}  // namespace espalier::detail
