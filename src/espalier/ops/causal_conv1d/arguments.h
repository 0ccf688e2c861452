// SPDX-License-Identifier: Apache-2.0
// What implementations of causal_conv1d share.
#pragma once

#include "espalier/ops/causal_conv1d/causal_conv1d.h"

namespace espalier::detail {

/// Ranks, shapes, dtypes and devices; not the values of prev.
void check_causal_conv1d(const CausalConv1d& given);

/// The rows of ConvolutionRows (taps.h) [1 + N (W - 1) + T, C]. Differentiable.
at::Tensor convolution_rows(const at::Tensor& x, const at::Tensor& tails);

using ConvolutionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // x, weight, bias, tails

}  // namespace espalier::detail
