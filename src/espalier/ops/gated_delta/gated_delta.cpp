// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gated_delta/gated_delta.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/dispatch.h"
#include "espalier/ops/gated_delta/checks.h"

namespace espalier {
namespace {

using detail::find_op;
using detail::if_defined;
using detail::meta_like;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using TensorPair = detail::DeltaResults;
using Gradients = detail::DeltaGradients;

TensorPair call_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                        const at::Tensor& beta, const at::Tensor& prev, const OptionalTensor& states,
                        const at::Tensor& ends, int64_t chunk_size) {
  static const auto op = find_op<decltype(call_forward)>("espalier::gated_delta_rule");
  return op.call(q, k, v, g, beta, prev, states, ends, chunk_size);
}

Gradients call_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_end_states,
                        const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                        const at::Tensor& beta, const at::Tensor& prev, const OptionalTensor& states,
                        const at::Tensor& ends, int64_t chunk_size) {
  static const auto op = find_op<decltype(call_backward)>("espalier::gated_delta_rule_backward");
  return op.call(grad_out, grad_end_states, q, k, v, g, beta, prev, states, ends, chunk_size);
}

class DeltaRule : public torch::autograd::Function<DeltaRule> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
                               const at::Tensor& prev, const OptionalTensor& states, const at::Tensor& ends,
                               int64_t chunk_size) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({q, k, v, g, beta, prev, states.value_or(at::Tensor()), ends});
    ctx->saved_data["chunk_size"] = chunk_size;
    ctx->set_materialize_grads(false);
    auto [out, end_states] = call_forward(q, k, v, g, beta, prev, states, ends, chunk_size);
    return {out, end_states};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(9);
    const variable_list saved = ctx->get_saved_variables();
    auto [q, k, v, g, beta, states] = call_backward(
        if_defined(grads[0]), if_defined(grads[1]), saved[0], saved[1], saved[2], saved[3], saved[4],
        saved[5], if_defined(saved[6]), saved[7], ctx->saved_data["chunk_size"].toInt());
    return {q, k, v, g, beta, {}, states, {}, {}};
  }
};

TensorPair forward_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& g, const at::Tensor& beta, const at::Tensor& prev,
                            const OptionalTensor& states, const at::Tensor& ends, int64_t chunk_size) {
  const variable_list results = DeltaRule::apply(q, k, v, g, beta, prev, states, ends, chunk_size);
  return {results[0], results[1]};
}

TensorPair forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                        const at::Tensor& beta, const at::Tensor& prev, const OptionalTensor& states,
                        const at::Tensor& ends, int64_t chunk_size) {
  detail::check_gated_delta_rule({q, k, v, g, beta, prev, states, ends, chunk_size});
  return {meta_like(v),
          at::empty_symint({ends.sym_size(0), v.sym_size(1), q.sym_size(2), v.sym_size(2)}, g.options())};
}

Gradients backward_meta(const OptionalTensor&, const OptionalTensor&, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
                        const at::Tensor&, const OptionalTensor& states, const at::Tensor&, int64_t) {
  return {meta_like(q), meta_like(k),    meta_like(v),
          meta_like(g), meta_like(beta), states ? meta_like(*states) : at::Tensor()};
}

}  // namespace

void detail::check_gated_delta_rule(const DeltaArguments& given) {
  const char* op = "gated_delta_rule";
  const auto dtype = given.q.scalar_type();
  TORCH_CHECK(given.q.dim() == 3 && given.q.numel() > 0 &&
                  (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16),
              op, ": q must be [T, K, Dk] float64, float32 or bfloat16, received ", given.q.sizes(), " ",
              dtype);
  TORCH_CHECK(given.v.dim() == 3 && given.v.numel() > 0 && given.v.size(1) % given.q.size(1) == 0, op,
              ": v must be [T, H, Dv], H a multiple of the ", given.q.size(1), " heads of q, received ",
              given.v.sizes());
  const int64_t tokens = given.q.size(0), heads = given.v.size(1);
  check_tensor(op, "k", given.k, {"[T, K, Dk]", given.q.sizes(), given.q.options()});
  check_tensor(op, "v", given.v, {"[T, H, Dv]", {tokens, heads, given.v.size(2)}, given.q.options()});
  const at::TensorOptions sums = given.q.options().dtype(accumulator_dtype(dtype));
  check_tensor(op, "g", given.g, {"[T, H]", {tokens, heads}, sums});
  check_tensor(op, "beta", given.beta, {"[T, H]", {tokens, heads}, sums});
  if (given.states) {
    check_tensor(op, "states", *given.states,
                 {"[N, H, Dk, Dv]", {given.states->size(0), heads, given.q.size(2), given.v.size(2)}, sums});
  }
}

detail::UnitRows detail::unit_rows(const at::Tensor& x) {
  const at::Tensor inverse = x.square().sum({-1}, /*keepdim=*/true).add_(1e-6).rsqrt_();
  return {x * inverse, inverse};
}

at::Tensor detail::unit_rows_backward(const at::Tensor& grad, const UnitRows& rows) {
  const at::Tensor along = (grad * rows.unit).sum({-1}, /*keepdim=*/true);
  return (grad - rows.unit * along) * rows.inverse_length;
}

GatedDeltaOutput gated_delta_rule(const GatedDeltaRule& given) {
  auto [out, states] = call_forward(given.q, given.k, given.v, given.g, given.beta, given.prev,
                                    if_defined(given.states), given.ends, given.chunk_size);
  return {out, states};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("gated_delta_rule", &forward_autograd);
  m.impl("gated_delta_rule_backward",
         torch::autograd::autogradNotImplementedFallback());  // no double backward
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("gated_delta_rule", &forward_meta);
  m.impl("gated_delta_rule_backward", &backward_meta);
}

}  // namespace espalier
