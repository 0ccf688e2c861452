// SPDX-License-Identifier: Apache-2.0
// The rule of base/error_ratio.h for tensors.
#pragma once

#include <ATen/ATen.h>

#include "espalier/base/error_ratio.h"

namespace espalier {

/// Half the distance from 1 to the next number of float32, bfloat16 or float16.
inline double unit_roundoff(at::ScalarType dtype) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
              "expected float32, bfloat16 or float16, received ", dtype);
  return dtype == at::kFloat ? kFloat32Roundoff : dtype == at::kHalf ? kFloat16Roundoff : kBFloat16Roundoff;
}

/// Of a result in low precision and of the plain form's, in float64. Infinite where one is of another shape
/// than the exact result, or not finite.
inline SquaredErrors squared_errors(const at::Tensor& ours, const at::Tensor& plain,
                                    const at::Tensor& exact) {
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.detach().to(at::TensorOptions(at::kCPU).dtype(at::kDouble));
  };
  const auto squares = [](const at::Tensor& tensor) { return tensor.square().sum().item<double>(); };
  const at::Tensor target = wide(exact);
  const auto error_of = [&](const at::Tensor& result) {
    const double error = result.sizes() == exact.sizes() ? squares(wide(result) - target) : INFINITY;
    return std::isfinite(error) ? error : INFINITY;
  };
  return {error_of(ours), error_of(plain), squares(target), target.numel()};
}

}  // namespace espalier
