// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/ssm_scan/ssm_scan.h"

#include "espalier/ops/checks.h"
#include "espalier/ops/chunk_scan/recurrence.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::meta_like;

using SsmResults = std::tuple<at::Tensor, at::Tensor>;  // out, states at the ends
/// Gradients of x, dt, A, B, C, D and states, in their dtypes.
using SsmGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct Scan : detail::Definition<"ssm_scan", SsmScan, SsmResults> {
  static constexpr std::array<size_t, 7> differentiable{0, 1, 2, 3, 4, 5, 7};

  static auto backward(const detail::Recorded<Scan>& recorded, const detail::TensorVector& grads) {
    return detail::call<"ssm_scan_backward", SsmGradients>(TensorOrNone(grads[0]), TensorOrNone(grads[1]),
                                                           recorded.given);
  }
};

/// Checks ranks, shapes, dtypes and devices, but not the values of prev and ends.
void check(const SsmScan& given) {
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
  detail::check_tensor(op, "B", b, {"[T, G, N]", {tokens, b.size(1), b.size(2)}, x.options()});
  detail::check_tensor(op, "C", c, {"[T, G, N]", b.sym_sizes(), x.options()});
  const at::TensorOptions sums = x.options().dtype(detail::accumulator_dtype(dtype));
  detail::check_tensor(op, "dt", dt, {"[T, H]", {tokens, heads}, sums});
  detail::check_tensor(op, "A", a, {"[H]", {heads}, sums});
  detail::check_if_defined(op, "D", d, {"[H]", {heads}, sums});
  const c10::SymInt count = states.defined() ? states.sym_size(0) : 0;
  detail::check_if_defined(op, "states", states,
                           {"[M, H, N, P]", {count, heads, b.size(2), x.size(2)}, sums});
}

SsmResults scan_forward_meta(const SsmScan& given) {
  check(given);
  const at::Tensor &x = given.x, &b = given.b;
  return {meta_like(x),
          at::empty_symint({given.ends.sym_size(0), x.sym_size(1), b.sym_size(2), x.sym_size(2)},
                           given.dt.options())};
}

SsmGradients scan_backward_meta(const TensorOrNone&, const TensorOrNone&, const SsmScan& given) {
  return {meta_like(given.x), meta_like(given.dt), meta_like(given.a),     meta_like(given.b),
          meta_like(given.c), meta_like(given.d),  meta_like(given.states)};
}

at::Tensor in_sums(const SsmScan& given, const at::Tensor& rows) {
  return rows.to(given.dt.scalar_type());
}

/// A CpuRecurrence or a ComposedRecurrence: rows dt x are added to states without the delta rule, with decays
/// exp(dt A).
template <class Recurrence>
Recurrence recurrence_of(const SsmScan& given) {
  check(given);
  return {"ssm_scan",
          {.delta = false,
           .scale = 1,
           .q = in_sums(given, given.c),
           .k = in_sums(given, given.b),
           .v = in_sums(given, given.x) * given.dt.unsqueeze(-1),
           .g = given.dt * given.a,
           .beta = {},
           .contexts = given.states},
          detail::scan_paths(given)};
}

template <class Recurrence>
SsmResults forward(const SsmScan& given) {
  auto [out, ends] = recurrence_of<Recurrence>(given).forward();
  if (given.d.defined()) out.addcmul_(in_sums(given, given.x), given.d.unsqueeze(-1));
  return {out.to(given.x.scalar_type()), ends};
}

template <class Recurrence>
SsmGradients backward(const TensorOrNone& grad_out, const TensorOrNone& grad_ends, const SsmScan& given) {
  const at::Tensor x = in_sums(given, given.x);
  const at::Tensor grad = grad_out.defined() ? in_sums(given, grad_out) : at::zeros_like(x);
  const detail::RecurrenceInputs grads =
      recurrence_of<Recurrence>(given).backward(grad_out.defined() ? grad : at::Tensor(), grad_ends);
  at::Tensor grad_x = grads.v * given.dt.unsqueeze(-1), grad_d;
  if (given.d.defined()) {
    grad_x.addcmul_(grad, given.d.unsqueeze(-1));
    grad_d = (grad * x).sum({-1}).sum({0});
  }
  const auto dtype = given.x.scalar_type();
  return {grad_x.to(dtype),
          (grads.v * x).sum({-1}) + grads.g * given.a,
          (grads.g * given.dt).sum({0}),
          grads.k.to(dtype),
          grads.q.to(dtype),
          grad_d,
          grads.contexts};
}

}  // namespace

SsmScanOutput ssm_scan(const SsmScan& given) {
  auto [out, states] = Scan::forward(given);
  return {out, states};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  detail::Differentiated<Scan>::define(m);
}

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  detail::implement<&forward<detail::CpuRecurrence>, &backward<detail::CpuRecurrence>>(m, "ssm_scan");
}

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  detail::implement<&forward<detail::ComposedRecurrence>, &backward<detail::ComposedRecurrence>>(m,
                                                                                                 "ssm_scan");
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  detail::implement<&scan_forward_meta, &scan_backward_meta>(m, "ssm_scan");
}

}  // namespace espalier
