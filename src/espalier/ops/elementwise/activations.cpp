// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/elementwise/activations.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/version.h>

#include <numbers>

#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise/arguments.h"

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

constexpr double kLinearAbove = 20;  // threshold of softplus

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

/// Of gelu(x) = x sigmoid(2 y), y = sqrt(2 / pi) (x + c x^3): sigmoid(2 y), sigmoid(-2 y), and 2 y'.
struct GeluParts {
  at::Tensor rising, falling, slope;
};

GeluParts gelu_parts(const at::Tensor& x) {
  constexpr double kScale = 2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi, kCube = 0.044715;
  const at::Tensor square = x * x;
  auto [rising, falling] = detail::sigmoids((square * kCube).add_(1).mul_(x).mul_(kScale));
  return {rising, falling, (square * (3 * kCube)).add_(1).mul_(kScale)};
}

class Geglu : public Function<Geglu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    const at::Tensor x = upcast(gate);
    return (gelu_parts(x).rising * x).mul_(upcast(up)).to(gate.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor x = upcast(saved[0]), grad = upcast(grads[0]);
    const auto [rising, falling, slope] = gelu_parts(x);
    // `slope` may be infinite where one of the two is 0.
    const at::Tensor steep = (slope * x).mul_(falling).masked_fill_((rising * falling).eq(0), 0);
    return {steep.add_(1).mul_(rising).mul_(upcast(saved[1])).mul_(grad).to(saved[0].scalar_type()),
            (rising * x).mul_(grad).to(saved[1].scalar_type())};
  }
};

/// Every second column of [R, 2 I], from `first` on.
at::Tensor every_second(const at::Tensor& columns, int64_t first) {
  return columns.slice(1, first, std::nullopt, 2);
}

/// Where clamp_max(x, limit) has the gradient 0: above the limit, and since PyTorch 2.14 also at it.
at::Tensor is_flat(const at::Tensor& x, double limit) {
  constexpr bool kHasGradientAtLimit = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14;
  return kHasGradientAtLimit ? x.gt(limit) : x.ge(limit);
}

class ClampedSwiglu : public Function<ClampedSwiglu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up, double alpha, double limit) {
    ctx->save_for_backward({gate_up});
    ctx->saved_data["alpha"] = alpha;
    ctx->saved_data["limit"] = limit;
    const at::Tensor gate = upcast(every_second(gate_up, 0)).clamp_max(limit);
    const at::Tensor up = upcast(every_second(gate_up, 1)).clamp(-limit, limit);
    return detail::sigmoids(gate * alpha).first.mul_(gate).mul_(up.add_(1)).to(gate_up.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor gate_up = ctx->get_saved_variables()[0], grad = upcast(grads[0]);
    const double alpha = ctx->saved_data["alpha"].toDouble(), limit = ctx->saved_data["limit"].toDouble();
    const at::Tensor all_gate = upcast(every_second(gate_up, 0)), all_up = upcast(every_second(gate_up, 1));
    const at::Tensor gate = all_gate.clamp_max(limit), up = all_up.clamp(-limit, limit).add_(1);
    const auto [rising, falling] = detail::sigmoids(gate * alpha);
    at::Tensor grad_gate_up = at::empty(gate_up.sizes(), gate_up.options());
    const at::Tensor slope = (gate * falling).mul_(alpha).add_(1).mul_(rising);  // of x sigmoid(alpha x)
    every_second(grad_gate_up, 0).copy_(slope.mul_(up).mul_(grad).masked_fill_(is_flat(all_gate, limit), 0));
    every_second(grad_gate_up, 1)
        .copy_((gate * rising)
                   .mul_(grad)
                   .masked_fill_(is_flat(all_up, limit).logical_or_(is_flat(all_up.neg(), limit)), 0));
    return {grad_gate_up, {}, {}};
  }
};

}  // namespace

at::Tensor sigmoid(const at::Tensor& x) {
  return Sigmoid::apply(x);
}

at::Tensor softplus(const at::Tensor& x) {
  return Softplus::apply(x);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  detail::check_swiglu(gate, up, "geglu");
  return Geglu::apply(gate, up);
}

at::Tensor clamped_swiglu(const at::Tensor& gate_up, double alpha, double limit) {
  detail::check_clamped_swiglu(gate_up, limit);
  return ClampedSwiglu::apply(gate_up, alpha, limit);
}

}  // namespace espalier
