// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/kl.h"

#include <ATen/ATen.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/objective/scaled_exp.h"

namespace espalier {

double kl_estimate(double log_ratio, KlEstimator estimator, double scale) {
  switch (estimator) {
    case KlEstimator::kK1:
      return scale * log_ratio;
    case KlEstimator::kK2:
      return scale * log_ratio * (log_ratio / 2);
    case KlEstimator::kK3:
      return scale * std::expm1(-log_ratio / 2) * (std::exp(-log_ratio / 2) + 1) + scale * log_ratio;
  }
  throw InternalError("unknown estimator");
}

at::Tensor kl_estimate(const at::Tensor& log_ratio, KlEstimator estimator, const at::Tensor& scale) {
  const at::Tensor d = log_ratio.detach();
  switch (estimator) {
    case KlEstimator::kK1:
      return scale * log_ratio;
    case KlEstimator::kK2:
      return with_slope(scale * d * (d / 2), scale * d, log_ratio);
    case KlEstimator::kK3: {
      const at::Tensor exponential = scaled_expm1(scale, -d);
      return with_slope(exponential + scale * d, -exponential, log_ratio);
    }
  }
  throw InternalError("unknown estimator");
}

}  // namespace espalier
