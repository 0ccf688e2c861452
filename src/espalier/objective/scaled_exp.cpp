// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/scaled_exp.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

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

}  // namespace espalier
