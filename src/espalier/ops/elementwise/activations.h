// SPDX-License-Identifier: Apache-2.0
// Sigmoid, softplus and a clamped SwiGLU whose results do not depend on the number of threads. (At the ends
// of threads' shares at::sigmoid, at::silu and at::softplus use another exp in float32.) Composed of ATen's
// operators for every device, in the dtype of sums and rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace espalier {

/// 1 / (1 + exp(-x)), differentiable.
at::Tensor sigmoid(const at::Tensor& x);

/// log(1 + exp(x)), and x itself above 20, as of torch.nn.functional.softplus; differentiable.
at::Tensor softplus(const at::Tensor& x);

/// The clamped SwiGLU of gpt-oss (OpenAI, gpt-oss model card, 2025; GptOssExperts in Transformers),
/// differentiable. gate_up [R, 2 I] has gate and up in turn: x = gate_up[:, 0::2], u = gate_up[:, 1::2].
/// Returns (u' + 1) x' sigmoid(alpha x') [R, I] with x' = min(x, limit) and u' = min(max(u, -limit), limit);
/// the gradient of what is clamped is 0, of a value at the limit itself not. Backward keeps gate_up alone.
at::Tensor clamped_swiglu(const at::Tensor& gate_up, double alpha, double limit);

namespace detail {

/// The sigmoids of x and -x, each without cancellation.
std::pair<at::Tensor, at::Tensor> sigmoids(const at::Tensor& x);

}  // namespace detail
}  // namespace espalier
