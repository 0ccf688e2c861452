// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gated_delta/gated_delta.h"

#include <cmath>

#include "espalier/ops/checks.h"
#include "espalier/ops/chunk_scan/recurrence.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::meta_like;

using DeltaResults = std::tuple<at::Tensor, at::Tensor>;  // out, states at the ends
/// Gradients of q, k, v, g, beta and states, in their dtypes.
using DeltaGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct DeltaRule : detail::Definition<"gated_delta_rule", GatedDeltaRule, DeltaResults> {
  static constexpr std::array<size_t, 6> differentiable{0, 1, 2, 3, 4, 6};

  static auto backward(const detail::Recorded<DeltaRule>& recorded, const detail::TensorVector& grads) {
    return detail::call<"gated_delta_rule_backward", DeltaGradients>(TensorOrNone(grads[0]),
                                                                     TensorOrNone(grads[1]), recorded.given);
  }
};

/// Checks ranks, shapes, dtypes and devices, but not the values of prev and ends.
void check(const GatedDeltaRule& given) {
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
  detail::check_tensor(op, "k", given.k, {"[T, K, Dk]", given.q.sym_sizes(), given.q.options()});
  detail::check_tensor(op, "v", given.v, {"[T, H, Dv]", {tokens, heads, given.v.size(2)}, given.q.options()});
  const at::TensorOptions sums = given.q.options().dtype(detail::accumulator_dtype(dtype));
  detail::check_tensor(op, "g", given.g, {"[T, H]", {tokens, heads}, sums});
  detail::check_tensor(op, "beta", given.beta, {"[T, H]", {tokens, heads}, sums});
  const at::Tensor& states = given.states;
  const c10::SymInt count = states.defined() ? states.sym_size(0) : 0;
  detail::check_if_defined(op, "states", states,
                           {"[N, H, Dk, Dv]", {count, heads, given.q.size(2), given.v.size(2)}, sums});
}

DeltaResults delta_forward_meta(const GatedDeltaRule& given) {
  check(given);
  const at::Tensor &q = given.q, &v = given.v;
  return {meta_like(v),
          at::empty_symint({given.ends.sym_size(0), v.sym_size(1), q.sym_size(2), v.sym_size(2)},
                           given.g.options())};
}

DeltaGradients delta_backward_meta(const TensorOrNone&, const TensorOrNone&, const GatedDeltaRule& given) {
  return {meta_like(given.q), meta_like(given.k),    meta_like(given.v),
          meta_like(given.g), meta_like(given.beta), meta_like(given.states)};
}

/// x / sqrt(|x|^2 + 1e-6) over the last dimension, and the factor.
struct UnitRows {
  at::Tensor unit, inverse_length;

  explicit UnitRows(const at::Tensor& x)
      : inverse_length(x.square().sum({-1}, /*keepdim=*/true).add_(1e-6).rsqrt_()) {
    unit = x * inverse_length;
  }

  /// The gradient of x from that of the unit rows.
  at::Tensor backward(const at::Tensor& grad) const {
    const at::Tensor along = (grad * unit).sum({-1}, /*keepdim=*/true);
    return (grad - unit * along) * inverse_length;
  }
};

/// Rows in the accumulator dtype.
struct UpcastRows {
  UnitRows q, k;
  at::Tensor v;

  explicit UpcastRows(const GatedDeltaRule& given)
      : q(given.q.to(given.g.scalar_type())),
        k(given.k.to(given.g.scalar_type())),
        v(given.v.to(given.g.scalar_type())) {}
};

/// A CpuRecurrence or a ComposedRecurrence.
template <class Recurrence>
Recurrence recurrence_of(const UpcastRows& rows, const GatedDeltaRule& given) {
  return {"gated_delta_rule",
          {.delta = true,
           .scale = std::pow(static_cast<double>(given.q.size(2)), -0.5),
           .q = rows.q.unit,
           .k = rows.k.unit,
           .v = rows.v,
           .g = given.g,
           .beta = given.beta,
           .contexts = given.states},
          detail::scan_paths(given)};
}

template <class Recurrence>
DeltaResults forward(const GatedDeltaRule& given) {
  check(given);
  const auto [out, ends] = recurrence_of<Recurrence>(UpcastRows(given), given).forward();
  return {out.to(given.q.scalar_type()), ends};
}

template <class Recurrence>
DeltaGradients backward(const TensorOrNone& grad_out, const TensorOrNone& grad_ends,
                        const GatedDeltaRule& given) {
  check(given);
  const UpcastRows rows(given);
  const at::Tensor grad = grad_out.defined() ? grad_out.to(given.g.scalar_type()) : at::Tensor();
  const detail::RecurrenceInputs grads = recurrence_of<Recurrence>(rows, given).backward(grad, grad_ends);
  const auto dtype = given.q.scalar_type();
  return {rows.q.backward(grads.q).to(dtype),
          rows.k.backward(grads.k).to(dtype),
          grads.v.to(dtype),
          grads.g,
          grads.beta,
          grads.contexts};
}

}  // namespace

GatedDeltaOutput gated_delta_rule(const GatedDeltaRule& given) {
  auto [out, states] = DeltaRule::forward(given);
  return {out, states};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  detail::Differentiated<DeltaRule>::define(m);
}

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  detail::implement<&forward<detail::CpuRecurrence>, &backward<detail::CpuRecurrence>>(m, "gated_delta_rule");
}

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  detail::implement<&forward<detail::ComposedRecurrence>, &backward<detail::ComposedRecurrence>>(
      m, "gated_delta_rule");
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  detail::implement<&delta_forward_meta, &delta_backward_meta>(m, "gated_delta_rule");
}

}  // namespace espalier
