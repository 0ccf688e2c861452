// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/ssm_scan/ssm_scan.h"

#include "espalier/ops/checks.h"
#include "espalier/ops/operator.h"
#include "espalier/ops/ssm_scan/arguments.h"

namespace espalier {
namespace {

using detail::meta_like;

struct Scan : detail::Definition<"ssm_scan", SsmScan, detail::SsmResults> {
  static constexpr std::array<size_t, 7> differentiable{0, 1, 2, 3, 4, 5, 7};

  static auto backward(const detail::Recorded<Scan>& recorded, const detail::TensorVector& grads) {
    return detail::call<"ssm_scan_backward", detail::SsmGradients>(TensorOrNone(grads[0]),
                                                                   TensorOrNone(grads[1]), recorded.given);
  }
};

detail::SsmResults forward_meta(const SsmScan& given) {
  detail::check_ssm_scan(given);
  const at::Tensor &x = given.x, &b = given.b;
  return {meta_like(x),
          at::empty_symint({given.ends.sym_size(0), x.sym_size(1), b.sym_size(2), x.sym_size(2)},
                           given.dt.options())};
}

detail::SsmGradients backward_meta(const TensorOrNone&, const TensorOrNone&, const SsmScan& given) {
  return {meta_like(given.x), meta_like(given.dt), meta_like(given.a),     meta_like(given.b),
          meta_like(given.c), meta_like(given.d),  meta_like(given.states)};
}

}  // namespace

void detail::check_ssm_scan(const SsmScan& given) {
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
  check_tensor(op, "C", c, {"[T, G, N]", b.sym_sizes(), x.options()});
  const at::TensorOptions sums = x.options().dtype(accumulator_dtype(dtype));
  check_tensor(op, "dt", dt, {"[T, H]", {tokens, heads}, sums});
  check_tensor(op, "A", a, {"[H]", {heads}, sums});
  check_if_defined(op, "D", d, {"[H]", {heads}, sums});
  const c10::SymInt count = states.defined() ? states.sym_size(0) : 0;
  check_if_defined(op, "states", states, {"[M, H, N, P]", {count, heads, b.size(2), x.size(2)}, sums});
}

detail::SsmGradients detail::ssm_gradients(const SsmScan& given, const at::Tensor& grad_out,
                                           const SsmRowGradients& rows) {
  const at::Tensor x = given.x.to(given.dt.scalar_type());
  at::Tensor grad_x = rows.v * given.dt.unsqueeze(-1);
  if (given.d.defined()) grad_x.addcmul_(grad_out, given.d.unsqueeze(-1));
  const auto dtype = given.x.scalar_type();
  return {grad_x.to(dtype),
          (rows.v * x).sum({-1}) + rows.g * given.a,
          (rows.g * given.dt).sum({0}),
          rows.b.to(dtype),
          rows.c.to(dtype),
          given.d.defined() ? (grad_out * x).sum({-1}).sum({0}) : at::Tensor(),
          rows.states};
}

SsmScanOutput ssm_scan(const SsmScan& given) {
  auto [out, states] = Scan::forward(given);
  return {out, states};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  detail::Differentiated<Scan>::define(m);
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("ssm_scan", detail::kKernel<&forward_meta>);
  m.impl("ssm_scan_backward", detail::kKernel<&backward_meta>);
}

}  // namespace espalier
