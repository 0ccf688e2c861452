// SPDX-License-Identifier: Apache-2.0
// Estimates of the KL divergence of a policy p from a reference q, from samples of p (Schulman,
// "Approximating KL divergence", 2020). With d = log p - log q of a sample:
//   k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d.
// The expectation of k1 and of k3 is the divergence; k3 is never negative.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/objective/options.h"

namespace espalier {

/// `scale` times the estimate. The estimate alone may overflow float64.
double kl_estimate(double log_ratio, KlEstimator estimator, double scale);

/// The same elementwise, differentiable in log_ratio.
at::Tensor kl_estimate(const at::Tensor& log_ratio, KlEstimator estimator, const at::Tensor& scale);

}  // namespace espalier
