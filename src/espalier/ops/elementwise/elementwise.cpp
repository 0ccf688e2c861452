// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/elementwise/elementwise.h"

#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise/arguments.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::call;
using detail::meta_if;
using detail::meta_like;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using OptionalTensor = std::optional<at::Tensor>;
using TensorPair = std::tuple<at::Tensor, at::Tensor>;
using TensorTriple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

TensorTriple call_rms_norm(const at::Tensor& x, const TensorOrNone& addend, const at::Tensor& weight,
                           double eps) {
  return call<"rms_norm", TensorTriple>(x, addend, weight, eps);
}

TensorPair call_rms_norm_backward(const RmsNormGradient& given, std::array<bool, 2> wanted) {
  return call<"rms_norm_backward", TensorPair>(given.grad_y, TensorOrNone(given.grad_sum), given.x,
                                               given.weight, given.inverse_rms, wanted);
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
        call_rms_norm_backward({grads[0], detail::if_defined(grad_sum), saved[0], saved[1], saved[2]},
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
    return rotary(x, cos, sin, back);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {rotary(grads[0], saved[0], saved[1], !ctx->saved_data["back"].toBool()), {}, {}, {}};
  }
};

at::Tensor rotary_autograd(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  return Rotary::apply(x, cos, sin, back);
}

/// The arguments of swiglu.
struct SwigluArguments {
  at::Tensor gate, up;

  static auto all(auto& given) { return std::tie(given.gate, given.up); }
};

struct Swiglu : detail::Definition<"swiglu", SwigluArguments, at::Tensor> {
  static constexpr std::array<size_t, 2> differentiable{0, 1};

  static auto backward(const detail::Recorded<Swiglu>& recorded, const variable_list& grads) {
    return call<"swiglu_backward", TensorPair>(grads[0], recorded.given);
  }
};

TensorTriple rms_norm_meta(const at::Tensor& x, const TensorOrNone& addend, const at::Tensor& weight,
                           double) {
  detail::check_rms_norm(x, addend, weight);
  const auto options = x.options().dtype(detail::accumulator_dtype(x.scalar_type()));
  return {meta_like(x), meta_if(addend.defined(), x),
          at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), options)};
}

TensorPair rms_norm_backward_meta(const at::Tensor&, const TensorOrNone&, const at::Tensor& x,
                                  const at::Tensor& weight, const at::Tensor& inverse_rms,
                                  std::array<bool, 2> output_mask) {
  return {meta_if(output_mask[0], x),
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
  return call<"rotary", at::Tensor>(x, cos, sin, back);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return Swiglu::forward({gate, up});
}

RmsNormOutput rms_norm_forward(const at::Tensor& x, const OptionalTensor& addend, const at::Tensor& weight,
                               double eps) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto [y, sum, inverse_rms] = call_rms_norm(x, addend, weight, eps);
  return {y, sum, inverse_rms};
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return std::get<0>(call_rms_norm(x, {}, weight, eps));
}

RmsNormGradients rms_norm_backward(const RmsNormGradient& given, std::array<bool, 2> wanted) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto [x, weight] = call_rms_norm_backward(given, wanted);
  return {x, weight};
}

namespace detail {

void check_rms_norm(const at::Tensor& x, const at::Tensor& other, const at::Tensor& weight) {
  const char* op = "rms_norm";
  check_float(op, "x", x);
  check_rank(op, "weight", weight, 1);
  check_alike(op, "weight", weight, x);
  TORCH_CHECK(x.dim() > 0 && x.sym_size(-1) == weight.sym_size(0), op,
              ": expected x [..., C] and weight [C], received ", x.sym_sizes(), " and ", weight.sym_sizes());
  if (!other.defined()) return;
  check_alike(op, "addend or gradient", other, x);
  TORCH_CHECK(other.sym_sizes() == x.sym_sizes(), op, ": expected an addend or gradient of the shape of x, ",
              x.sym_sizes(), ", received ", other.sym_sizes());
}

void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const char* op = "rotary";
  check_float(op, "x", x);
  check_rank(op, "x", x, 3);
  for (const at::Tensor& table : {cos, sin}) {
    check_rank(op, "cos or sin", table, 2);
    TORCH_CHECK(table.sym_size(0) == x.sym_size(0) && table.sym_size(1) * 2 == x.sym_size(2) &&
                    table.scalar_type() == accumulator_dtype(x.scalar_type()) && table.device() == x.device(),
                op, ": expected x [T, H, D] and cos and sin [T, D/2] ", accumulator_dtype(x.scalar_type()),
                " on its device, received ", x.sym_sizes(), " and ", table.sym_sizes(), " ",
                table.scalar_type());
  }
}

void check_swiglu(const at::Tensor& gate, const at::Tensor& up, const char* op) {
  check_float(op, "gate", gate);
  check_alike(op, "up or gradient", up, gate);
  TORCH_CHECK(up.sym_sizes() == gate.sym_sizes(), op, ": expected an up or gradient of the shape of gate, ",
              gate.sym_sizes(), ", received ", up.sym_sizes());
}

void check_clamped_swiglu(const at::Tensor& gate_up, double limit) {
  const char* op = "clamped_swiglu";
  check_float(op, "gate_up", gate_up);
  check_rank(op, "gate_up", gate_up, 2);
  TORCH_CHECK(gate_up.size(1) % 2 == 0, op, ": expected gate_up [R, 2 I], received ", gate_up.sizes());
  check_limit(op, limit);
}

}  // namespace detail

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("rms_norm", &rms_norm_autograd);
  m.impl("rotary", &rotary_autograd);
  detail::Differentiated<Swiglu>::define(m);
  m.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());  // no double backward
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  detail::implement<&rms_norm_meta, &rms_norm_backward_meta>(m, "rms_norm");
  m.impl("rotary", &rotary_meta);
  detail::implement<&swiglu_meta, &swiglu_backward_meta>(m, "swiglu");
}

}  // namespace espalier
