// SPDX-License-Identifier: Apache-2.0
// The operators of elementwise.h as compositions of ATen's, on any device: what runs on GPUs. Same arguments,
// checks and results; no gradients. swiglu also rounds silu(gate) to the dtype, as Transformers does, and its
// backward pass silu(gate) and grad * up.
#pragma once

#include <array>
#include <tuple>

#include "espalier/ops/argument.h"

namespace espalier::composed {

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const TensorOrNone& addend,
                                                        const at::Tensor& weight, double eps);

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_y, const TensorOrNone& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& inverse_rms,
                                                     std::array<bool, 2> output_mask);

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back);

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up);

}  // namespace espalier::composed
