// SPDX-License-Identifier: Apache-2.0
// Products of a factor and an exponential that do not overflow where the exponential alone does.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

/// scale e^x of float64 tensors, detached; 0 where scale is 0. e^x alone may overflow float64.
at::Tensor scaled_exp(const at::Tensor& scale, const at::Tensor& x);

/// scale (e^x - 1), likewise.
at::Tensor scaled_expm1(const at::Tensor& scale, const at::Tensor& x);

/// `value` with derivative `slope` in x; both detached. Avoids a backward pass through an exponential that
/// overflows, which would give 0 * inf = NaN.
at::Tensor with_slope(const at::Tensor& value, const at::Tensor& slope, const at::Tensor& x);

}  // namespace espalier
