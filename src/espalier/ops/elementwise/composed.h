// SPDX-License-Identifier: Apache-2.0
// The operators of elementwise.h composed of ATen operators, for any device. Used on GPUs without our own
// kernels, or if those are disabled (own_kernels.h). Same arguments, checks, results and roundings; no
// autograd.
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
