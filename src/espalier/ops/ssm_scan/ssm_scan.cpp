// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/ssm_scan/ssm_scan.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/dispatch.h"
#include "espalier/ops/ssm_scan/checks.h"

namespace espalier {
namespace {

using detail::find_op;
using detail::if_defined;
using detail::meta_like;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using TensorPair = detail::SsmResults;
using Gradients = detail::SsmGradients;

TensorPair call_forward(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                        const at::Tensor& c, const OptionalTensor& d, const at::Tensor& prev,
                        const OptionalTensor& states, const at::Tensor& ends, int64_t chunk_size) {
  static const auto op = find_op<decltype(call_forward)>("espalier::ssm_scan");
  return op.call(x, dt, a, b, c, d, prev, states, ends, chunk_size);
}

Gradients call_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_end_states,
                        const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                        const at::Tensor& c, const OptionalTensor& d, const at::Tensor& prev,
                        const OptionalTensor& states, const at::Tensor& ends, int64_t chunk_size) {
  static const auto op = find_op<decltype(call_backward)>("espalier::ssm_scan_backward");
  return op.call(grad_out, grad_end_states, x, dt, a, b, c, d, prev, states, ends, chunk_size);
}

class Scan : public torch::autograd::Function<Scan> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& dt,
                               const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                               const OptionalTensor& d, const at::Tensor& prev, const OptionalTensor& states,
                               const at::Tensor& ends, int64_t chunk_size) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward(
        {x, dt, a, b, c, d.value_or(at::Tensor()), prev, states.value_or(at::Tensor()), ends});
    ctx->saved_data["chunk_size"] = chunk_size;
    ctx->set_materialize_grads(false);
    auto [out, end_states] = call_forward(x, dt, a, b, c, d, prev, states, ends, chunk_size);
    return {out, end_states};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(10);
    const variable_list saved = ctx->get_saved_variables();
    auto [x, dt, a, b, c, d, states] =
        call_backward(if_defined(grads[0]), if_defined(grads[1]), saved[0], saved[1], saved[2], saved[3],
                      saved[4], if_defined(saved[5]), saved[6], if_defined(saved[7]), saved[8],
                      ctx->saved_data["chunk_size"].toInt());
    return {x, dt, a, b, c, d, {}, states, {}, {}};
  }
};

TensorPair forward_autograd(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a,
                            const at::Tensor& b, const at::Tensor& c, const OptionalTensor& d,
                            const at::Tensor& prev, const OptionalTensor& states, const at::Tensor& ends,
                            int64_t chunk_size) {
  const variable_list results = Scan::apply(x, dt, a, b, c, d, prev, states, ends, chunk_size);
  return {results[0], results[1]};
}

TensorPair forward_meta(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                        const at::Tensor& c, const OptionalTensor& d, const at::Tensor& prev,
                        const OptionalTensor& states, const at::Tensor& ends, int64_t chunk_size) {
  detail::check_ssm_scan({x, dt, a, b, c, d, prev, states, ends, chunk_size});
  return {meta_like(x),
          at::empty_symint({ends.sym_size(0), x.sym_size(1), b.sym_size(2), x.sym_size(2)}, dt.options())};
}

Gradients backward_meta(const OptionalTensor&, const OptionalTensor&, const at::Tensor& x,
                        const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                        const OptionalTensor& d, const at::Tensor&, const OptionalTensor& states,
                        const at::Tensor&, int64_t) {
  const auto if_given = [](const OptionalTensor& tensor) {
    return tensor ? meta_like(*tensor) : at::Tensor();
  };
  return {meta_like(x), meta_like(dt), meta_like(a),    meta_like(b),
          meta_like(c), if_given(d),   if_given(states)};
}

}  // namespace

void detail::check_ssm_scan(const SsmArguments& given) {
  const char* op = "ssm_scan";
  const auto& [x, dt, a, b, c, d, prev, states, ends, chunk_size] = given;
  const auto dtype = x.scalar_type();
  TORCH_CHECK(x.dim() == 3 && x.numel() > 0 &&
                  (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16),
              op, ": x must be [T, H, P] float64, float32 or bfloat16, received ", x.sizes(), " ", dtype);
  TORCH_CHECK(b.dim() == 3 && b.numel() > 0 && x.size(1) % b.size(1) == 0, op,
              ": B must be [T, G, N], where the ", x.size(1), " heads of x are a multiple of G, received ",
              b.sizes());
  const int64_t tokens = x.size(0), heads = x.size(1);
  check_tensor(op, "B", b, {"[T, G, N]", {tokens, b.size(1), b.size(2)}, x.options()});
  check_tensor(op, "C", c, {"[T, G, N]", b.sizes(), x.options()});
  const at::TensorOptions sums = x.options().dtype(accumulator_dtype(dtype));
  check_tensor(op, "dt", dt, {"[T, H]", {tokens, heads}, sums});
  check_tensor(op, "A", a, {"[H]", {heads}, sums});
  if (d) check_tensor(op, "D", *d, {"[H]", {heads}, sums});
  if (states) {
    check_tensor(op, "states", *states,
                 {"[M, H, N, P]", {states->size(0), heads, b.size(2), x.size(2)}, sums});
  }
}

detail::SsmGradients detail::ssm_gradients(const SsmArguments& given, const at::Tensor& grad_out,
                                           const SsmRowGradients& rows) {
  const at::Tensor x = given.x.to(given.dt.scalar_type());
  at::Tensor grad_x = rows.v * given.dt.unsqueeze(-1);
  if (given.d) grad_x.addcmul_(grad_out, given.d->unsqueeze(-1));
  const auto dtype = given.x.scalar_type();
  return {grad_x.to(dtype),
          (rows.v * x).sum({-1}) + rows.g * given.a,
          (rows.g * given.dt).sum({0}),
          rows.b.to(dtype),
          rows.c.to(dtype),
          given.d ? (grad_out * x).sum({-1}).sum({0}) : at::Tensor(),
          rows.states};
}

SsmScanOutput ssm_scan(const SsmScan& given) {
  auto [out, states] = call_forward(given.x, given.dt, given.a, given.b, given.c, if_defined(given.d),
                                    given.prev, if_defined(given.states), given.ends, given.chunk_size);
  return {out, states};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("ssm_scan", &forward_autograd);
  m.impl("ssm_scan_backward", torch::autograd::autogradNotImplementedFallback());  // no double backward
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("ssm_scan", &forward_meta);
  m.impl("ssm_scan_backward", &backward_meta);
}

}  // namespace espalier
