// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/exponentials.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "espalier/base/check.h"

namespace espalier {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class WithSlope : public Function<WithSlope> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& /*x*/, const at::Tensor& value,
                            const at::Tensor& slope) {
    ctx->save_for_backward({slope});
    return value;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0] * ctx->get_saved_variables()[0], {}, {}};
  }
};

}  // namespace

at::Tensor scaled_exp(const at::Tensor& scale, const at::Tensor& x) {
  const at::Tensor root = (x.detach() / 2).exp_();
  return (scale * root).mul_(root).masked_fill_(scale.eq(0), 0);
}

at::Tensor scaled_expm1(const at::Tensor& scale, const at::Tensor& x) {
  const at::Tensor half = x.detach() / 2;
  return (scale * half.expm1()).mul_(half.exp_().add_(1)).masked_fill_(scale.eq(0), 0);
}

at::Tensor with_slope(const at::Tensor& value, const at::Tensor& slope, const at::Tensor& x) {
  return WithSlope::apply(x, value, slope);
}

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
