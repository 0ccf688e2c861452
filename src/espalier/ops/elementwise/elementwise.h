// SPDX-License-Identifier: Apache-2.0
// The elementwise operators of a decoder layer (docs/math.md): on the CPU each one pass over its tensors, on
// GPUs compositions of ATen's (composed.h).
// Tensors are float64, float32 or bfloat16, of the same dtype unless noted; computed in float32 (float64) and
// rounded when written. Deterministic for any number of threads. All throw on mismatched shapes, dtypes or
// devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace espalier {

/// Rotary position embedding (Su et al., "RoFormer", 2021), differentiable in x: rotates each pair (x[i], x[i
/// + D/2]) by its angle, the half-split convention of Transformers. x [T, H, D], D even; cos and sin [T, D/2]
/// float32 (float64 for float64). `back` rotates by the negative angle, which is the adjoint; so backward
/// saves no activation. Registered as torch.ops.espalier.rotary(x, cos, sin, back).
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back = false);

/// silu(gate) * up, differentiable; silu(x) = x / (1 + exp(-x)) (Shazeer, "GLU variants improve transformer",
/// 2020). Both have the same shape; backward saves only them. Rounded once on
/// the CPU, on GPUs as composed.h says. Registered as torch.ops.espalier.swiglu(gate, up).
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Root mean square norm over the last dimension (Zhang and Sennrich, "Root Mean Square Layer Normalization",
/// 2019) of x [..., C], or of x + addend: weight * (x / rms(x)), the bracket rounded to the dtype of x before
/// the product as in Transformers; rms(x) = sqrt(mean(x^2) + eps). weight [C].
struct RmsNormOutput {
  at::Tensor y;
  at::Tensor sum;          // x + addend; undefined without one
  at::Tensor inverse_rms;  // of the leading dimensions of x; float32 (float64)
};
/// Registered as torch.ops.espalier.rms_norm(x, addend, weight, eps) -> (y, sum, inverse_rms), differentiable
/// in x, addend and weight through y and sum. This function runs without autograd.
RmsNormOutput rms_norm_forward(const at::Tensor& x, const std::optional<at::Tensor>& addend,
                               const at::Tensor& weight, double eps);

/// Returns y only, differentiable in x and weight.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// The inputs of the backward pass of rms_norm.
struct RmsNormGradient {
  at::Tensor grad_y;
  std::optional<at::Tensor> grad_sum;  // added to that of x
  at::Tensor x;                        // the normalised tensor: with an addend, the sum
  at::Tensor weight;
  at::Tensor inverse_rms;
};
struct RmsNormGradients {
  at::Tensor x;       // also of the addend
  at::Tensor weight;  // [C] float32 (float64)
};
/// Returns the requested gradients, others undefined. Runs without autograd.
RmsNormGradients rms_norm_backward(const RmsNormGradient& given, std::array<bool, 2> wanted);

}  // namespace espalier
