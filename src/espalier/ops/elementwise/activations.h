// SPDX-License-Identifier: Apache-2.0
// Sigmoid and softplus whose results do not depend on the number of threads. (At the ends of threads' shares
// at::sigmoid, at::silu and at::softplus use another exp in float32.) Composed of ATen's operators for every
// device, in the dtype of sums and rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace espalier {

/// 1 / (1 + exp(-x)), differentiable.
at::Tensor sigmoid(const at::Tensor& x);

/// log(1 + exp(x)), and x itself above 20, as of torch.nn.functional.softplus; differentiable.
at::Tensor softplus(const at::Tensor& x);

namespace detail {

/// The sigmoids of x and -x, each without cancellation.
std::pair<at::Tensor, at::Tensor> sigmoids(const at::Tensor& x);

}  // namespace detail
}  // namespace espalier
