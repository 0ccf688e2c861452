// SPDX-License-Identifier: Apache-2.0
// The arguments of causal_conv1d, as the dispatcher hands them on.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace espalier::detail {

struct ConvolutionArguments {
  const at::Tensor& x;
  const at::Tensor& weight;
  const std::optional<at::Tensor>& bias;
  const at::Tensor& prev;
  const std::optional<at::Tensor>& tails;
};

/// Ranks, shapes, dtypes and devices; not the values of prev.
void check_causal_conv1d(const ConvolutionArguments& given);

/// Of each argument; undefined where there is none.
struct ConvolutionGradients {
  at::Tensor x, weight, bias, tails;
};

/// The rows of ConvolutionRows (taps.h) [1 + N (W - 1) + T, C]. Differentiable.
at::Tensor convolution_rows(const at::Tensor& x, const std::optional<at::Tensor>& tails);

}  // namespace espalier::detail
