// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gated_delta/gated_delta.h"

#include "espalier/ops/checks.h"
#include "espalier/ops/gated_delta/arguments.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::meta_like;

struct DeltaRule : detail::Definition<"gated_delta_rule", GatedDeltaRule, detail::DeltaResults> {
  static constexpr std::array<size_t, 6> differentiable{0, 1, 2, 3, 4, 6};

  static auto backward(const detail::Recorded<DeltaRule>& recorded, const detail::TensorVector& grads) {
    return detail::call<"gated_delta_rule_backward", detail::DeltaGradients>(
        TensorOrNone(grads[0]), TensorOrNone(grads[1]), recorded.given);
  }
};

detail::DeltaResults forward_meta(const GatedDeltaRule& given) {
  detail::check_gated_delta_rule(given);
  const at::Tensor &q = given.q, &v = given.v;
  return {meta_like(v),
          at::empty_symint({given.ends.sym_size(0), v.sym_size(1), q.sym_size(2), v.sym_size(2)},
                           given.g.options())};
}

detail::DeltaGradients backward_meta(const TensorOrNone&, const TensorOrNone&, const GatedDeltaRule& given) {
  return {meta_like(given.q), meta_like(given.k),    meta_like(given.v),
          meta_like(given.g), meta_like(given.beta), meta_like(given.states)};
}

}  // namespace

void detail::check_gated_delta_rule(const GatedDeltaRule& given) {
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
  check_tensor(op, "k", given.k, {"[T, K, Dk]", given.q.sym_sizes(), given.q.options()});
  check_tensor(op, "v", given.v, {"[T, H, Dv]", {tokens, heads, given.v.size(2)}, given.q.options()});
  const at::TensorOptions sums = given.q.options().dtype(accumulator_dtype(dtype));
  check_tensor(op, "g", given.g, {"[T, H]", {tokens, heads}, sums});
  check_tensor(op, "beta", given.beta, {"[T, H]", {tokens, heads}, sums});
  const at::Tensor& states = given.states;
  const c10::SymInt count = states.defined() ? states.sym_size(0) : 0;
  check_if_defined(op, "states", states,
                   {"[N, H, Dk, Dv]", {count, heads, given.q.size(2), given.v.size(2)}, sums});
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
  auto [out, states] = DeltaRule::forward(given);
  return {out, states};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  detail::Differentiated<DeltaRule>::define(m);
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("gated_delta_rule", detail::kKernel<&forward_meta>);
  m.impl("gated_delta_rule_backward", detail::kKernel<&backward_meta>);
}

}  // namespace espalier
