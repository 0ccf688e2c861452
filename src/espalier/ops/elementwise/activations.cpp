// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/elementwise/activations.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "espalier/ops/checks.h"

namespace espalier {
namespace detail {

std::pair<at::Tensor, at::Tensor> sigmoids(const at::Tensor& x) {
  const at::Tensor above = x.ge(0);
  const at::Tensor small = at::where(above, x.neg(), x).exp_();  // at::abs has no kernel for meta tensors
  const at::Tensor inverse = (small + 1).reciprocal_(), low = small * inverse;
  return {at::where(above, inverse, low), at::where(above, low, inverse)};
}

}  // namespace detail

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr double kLinearAbove = 20;  // of softplus

at::Tensor upcast(const at::Tensor& x) {
  return x.to(detail::accumulator_dtype(x.scalar_type()));
}

class Sigmoid : public Function<Sigmoid> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return detail::sigmoids(upcast(x)).first.to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    const auto [rising, falling] = detail::sigmoids(upcast(x));
    return {(upcast(grads[0]) * rising * falling).to(x.scalar_type())};
  }
};

class Softplus : public Function<Softplus> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return at::where(x > kLinearAbove, x,
                     upcast(x).clamp_max(kLinearAbove).exp_().log1p_().to(x.scalar_type()));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    const at::Tensor below = upcast(grads[0]) * detail::sigmoids(upcast(x)).first;
    return {at::where(x > kLinearAbove, grads[0], below.to(x.scalar_type()))};
  }
};

}  // namespace

at::Tensor sigmoid(const at::Tensor& x) {
  return Sigmoid::apply(x);
}

at::Tensor softplus(const at::Tensor& x) {
  return Softplus::apply(x);
}

}  // namespace espalier
