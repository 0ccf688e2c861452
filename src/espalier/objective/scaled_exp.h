// SPDX-License-Identifier: Apache-2.0
// Products of a factor and an exponential, finite also where the exponential alone is not.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

/// scale e^x of float64 tensors, without gradient; 0 where the scale is 0. e^x itself may lie beyond float64.
at::Tensor scaled_exp(const at::Tensor& scale, const at::Tensor& x);

/// scale (e^x - 1), likewise.
at::Tensor scaled_expm1(const at::Tensor& scale, const at::Tensor& x);

/// `value` with the derivative `slope` in x; both without gradient. So no gradient goes through an
/// exponential that overflows: 0 times infinity is not a number.
at::Tensor with_slope(const at::Tensor& value, const at::Tensor& slope, const at::Tensor& x);

}  // namespace espalier
