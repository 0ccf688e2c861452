// SPDX-License-Identifier: Apache-2.0
// Products of a factor and an exponential that do not overflow where the exponential alone does, and
// estimates of divergences.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/objective/options.h"

namespace espalier {

/// scale e^x of float64 tensors, detached; 0 where scale is 0. e^x alone may overflow float64.
at::Tensor scaled_exp(const at::Tensor& scale, const at::Tensor& x);

/// scale (e^x - 1), likewise.
at::Tensor scaled_expm1(const at::Tensor& scale, const at::Tensor& x);

/// `value` with derivative `slope` in x; both detached. Avoids a backward pass through an exponential that
/// overflows, which would give 0 * inf = NaN.
at::Tensor with_slope(const at::Tensor& value, const at::Tensor& slope, const at::Tensor& x);

/// Estimates of the KL divergence of a policy p from a reference q, from samples of p (Schulman,
/// "Approximating KL divergence", 2020). With d = log p - log q of a sample:
///   k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d.
/// The expectation of k1 and of k3 is the divergence; k3 is never negative.
/// Returns `scale` times the estimate, which alone may overflow float64.
double kl_estimate(double log_ratio, KlEstimator estimator, double scale);

/// The same elementwise, differentiable in log_ratio.
at::Tensor kl_estimate(const at::Tensor& log_ratio, KlEstimator estimator, const at::Tensor& scale);

}  // namespace espalier
