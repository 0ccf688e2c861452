// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/elementwise/elementwise.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/dispatch.h"

namespace espalier {
namespace {

using detail::find_op;
using detail::if_defined;
using detail::meta_like;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using OptionalTensor = std::optional<at::Tensor>;
using TensorPair = std::tuple<at::Tensor, at::Tensor>;
using TensorTriple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

TensorTriple call_rms_norm(const at::Tensor& x, const OptionalTensor& addend, const at::Tensor& weight,
                           double eps) {
  static const auto op = find_op<decltype(call_rms_norm)>("espalier::rms_norm");
  return op.call(x, addend, weight, eps);
}

TensorPair call_rms_norm_backward(const at::Tensor& grad_y, const OptionalTensor& grad_sum,
                                  const at::Tensor& x, const at::Tensor& weight,
                                  const at::Tensor& inverse_rms, std::array<bool, 2> output_mask) {
  static const auto op = find_op<decltype(call_rms_norm_backward)>("espalier::rms_norm_backward");
  return op.call(grad_y, grad_sum, x, weight, inverse_rms, output_mask);
}

at::Tensor call_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  static const auto op = find_op<decltype(call_rotary)>("espalier::rotary");
  return op.call(x, cos, sin, back);
}

at::Tensor call_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = find_op<decltype(call_swiglu)>("espalier::swiglu");
  return op.call(gate, up);
}

TensorPair call_swiglu_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = find_op<decltype(call_swiglu_backward)>("espalier::swiglu_backward");
  return op.call(grad, gate, up);
}

class RmsNorm : public Function<RmsNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const OptionalTensor& addend,
                               const at::Tensor& weight, double eps) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, sum, inverse_rms] = call_rms_norm(x, addend, weight, eps);
    ctx->save_for_backward({sum.defined() ? sum : x, weight, inverse_rms});
    ctx->mark_non_differentiable({inverse_rms});
    ctx->set_materialize_grads(false);
    variable_list outputs{y, inverse_rms};
    if (sum.defined()) outputs.push_back(sum);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor grad_sum = grads.size() > 2 ? grads[2] : at::Tensor();
    if (!grads[0].defined()) return {grad_sum, grad_sum, {}, {}};
    const variable_list saved = ctx->get_saved_variables();
    const bool has_addend = grads.size() > 2;
    const bool wants_x = ctx->needs_input_grad(0) || (has_addend && ctx->needs_input_grad(1));
    auto [grad_x, grad_weight] =
        call_rms_norm_backward(grads[0], if_defined(grad_sum), saved[0], saved[1], saved[2],
                               {wants_x, ctx->needs_input_grad(has_addend ? 2 : 1)});
    if (grad_weight.defined()) grad_weight = grad_weight.to(saved[1].scalar_type());
    return {grad_x, has_addend ? grad_x : at::Tensor(), grad_weight, {}};
  }
};

TensorTriple rms_norm_autograd(const at::Tensor& x, const OptionalTensor& addend, const at::Tensor& weight,
                               double eps) {
  const variable_list outputs = RmsNorm::apply(x, addend, weight, eps);
  return {outputs[0], outputs.size() > 2 ? outputs[2] : at::Tensor(), outputs[1]};
}

class Rotary : public Function<Rotary> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin, bool back) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["back"] = back;
    return call_rotary(x, cos, sin, back);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {call_rotary(grads[0], saved[0], saved[1], !ctx->saved_data["back"].toBool()), {}, {}, {}};
  }
};

at::Tensor rotary_autograd(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  return Rotary::apply(x, cos, sin, back);
}

class Swiglu : public Function<Swiglu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, up});
    return call_swiglu(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [grad_gate, grad_up] = call_swiglu_backward(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

at::Tensor swiglu_autograd(const at::Tensor& gate, const at::Tensor& up) {
  return Swiglu::apply(gate, up);
}

TensorTriple rms_norm_meta(const at::Tensor& x, const OptionalTensor& addend, const at::Tensor& weight,
                           double) {
  detail::check_rms_norm(x, addend, weight);
  const auto options = x.options().dtype(detail::accumulator_dtype(x.scalar_type()));
  return {meta_like(x), addend ? meta_like(x) : at::Tensor(),
          at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), options)};
}

TensorPair rms_norm_backward_meta(const at::Tensor&, const OptionalTensor&, const at::Tensor& x,
                                  const at::Tensor& weight, const at::Tensor& inverse_rms,
                                  std::array<bool, 2> output_mask) {
  return {output_mask[0] ? meta_like(x) : at::Tensor(),
          output_mask[1] ? at::empty_symint(weight.sym_sizes(), inverse_rms.options()) : at::Tensor()};
}

at::Tensor rotary_meta(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool) {
  detail::check_rotary(x, cos, sin);
  return meta_like(x);
}

at::Tensor swiglu_meta(const at::Tensor& gate, const at::Tensor& up) {
  detail::check_swiglu(gate, up);
  return meta_like(gate);
}

TensorPair swiglu_backward_meta(const at::Tensor&, const at::Tensor& gate, const at::Tensor& up) {
  return {meta_like(gate), meta_like(up)};
}

}  // namespace

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  return call_rotary(x, cos, sin, back);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return call_swiglu(gate, up);
}

RmsNormOutput rms_norm_forward(const at::Tensor& x, const OptionalTensor& addend, const at::Tensor& weight,
                               double eps) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto [y, sum, inverse_rms] = call_rms_norm(x, addend, weight, eps);
  return {y, sum, inverse_rms};
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return std::get<0>(call_rms_norm(x, std::nullopt, weight, eps));
}

RmsNormGradients rms_norm_backward(const RmsNormGradient& given, std::array<bool, 2> wanted) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto [x, weight] =
      call_rms_norm_backward(given.grad_y, given.grad_sum, given.x, given.weight, given.inverse_rms, wanted);
  return {x, weight};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("rms_norm", &rms_norm_autograd);
  m.impl("rotary", &rotary_autograd);
  m.impl("swiglu", &swiglu_autograd);
  // No double backward.
  m.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("swiglu_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("rms_norm", &rms_norm_meta);
  m.impl("rms_norm_backward", &rms_norm_backward_meta);
  m.impl("rotary", &rotary_meta);
  m.impl("swiglu", &swiglu_meta);
  m.impl("swiglu_backward", &swiglu_backward_meta);
}

}  // namespace espalier
