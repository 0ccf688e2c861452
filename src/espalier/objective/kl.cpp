// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/kl.h"

#include <ATen/ATen.h>

#include <cmath>

#include "espalier/base/check.h"

namespace espalier {

double kl_estimate(double log_ratio, KlEstimator estimator) {
  switch (estimator) {
    case KlEstimator::kK1:
      return log_ratio;
    case KlEstimator::kK2:
      return log_ratio * log_ratio / 2;
    case KlEstimator::kK3:
      return std::expm1(-log_ratio) + log_ratio;
  }
  throw InternalError("unknown estimator");
}

at::Tensor kl_estimate(const at::Tensor& log_ratio, KlEstimator estimator) {
  switch (estimator) {
    case KlEstimator::kK1:
      return log_ratio;
    case KlEstimator::kK2:
      return log_ratio.square() / 2;
    case KlEstimator::kK3:
      return at::expm1(-log_ratio) + log_ratio;
  }
  throw InternalError("unknown estimator");
}

}  // namespace espalier
