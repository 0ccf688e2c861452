// SPDX-License-Identifier: Apache-2.0
// Sigmoid, softplus, GeGLU and a clamped SwiGLU whose results do not depend on the number of threads. (At the
// ends of thread ranges, at::sigmoid, at::silu and at::softplus use a different exp in float32.) Composed of
// ATen operators for every device, in the accumulator dtype and rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace espalier {

/// 1 / (1 + exp(-x)), differentiable.
at::Tensor sigmoid(const at::Tensor& x);

/// log(1 + exp(x)), and x above 20, as in torch.nn.functional.softplus; differentiable.
at::Tensor softplus(const at::Tensor& x);

/// gelu(gate) * up, differentiable, with gelu approximated by tanh: gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x
/// + 0.044715 x^3))) (Hendrycks and Gimpel, "Gaussian error linear units", 2016). Both have the same shape;
/// backward saves only them.
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);

/// The clamped SwiGLU of gpt-oss (OpenAI, gpt-oss model card, 2025; GptOssExperts in Transformers),
/// differentiable. gate_up [R, 2 I] interleaves gate and up: x = gate_up[:, 0::2], u = gate_up[:, 1::2].
/// Returns (u' + 1) x' sigmoid(alpha x') [R, I] with x' = min(x, limit) and u' = min(max(u, -limit), limit);
/// the gradient of clamped values is 0, and at the limit itself what it is in PyTorch: 1 before 2.14, 0
/// since. Backward saves only gate_up.
at::Tensor clamped_swiglu(const at::Tensor& gate_up, double alpha, double limit);

namespace detail {

/// sigmoid(x) and sigmoid(-x), both without cancellation.
std::pair<at::Tensor, at::Tensor> sigmoids(const at::Tensor& x);

}  // namespace detail
}  // namespace espalier
