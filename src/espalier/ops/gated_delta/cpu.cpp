// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule on the CPU.
#include <ATen/ATen.h>

#include <cmath>

#include "espalier/ops/chunk_scan/cpu.h"
#include "espalier/ops/gated_delta/arguments.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

/// Rows in the accumulator dtype.
struct Rows {
  detail::UnitRows q, k;
  at::Tensor v;

  explicit Rows(const GatedDeltaRule& given)
      : q(detail::unit_rows(given.q.to(given.g.scalar_type()))),
        k(detail::unit_rows(given.k.to(given.g.scalar_type()))),
        v(given.v.to(given.g.scalar_type())) {}
};

detail::CpuRecurrence recurrence_of(const Rows& rows, const GatedDeltaRule& given) {
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

detail::DeltaResults forward(const GatedDeltaRule& given) {
  detail::check_gated_delta_rule(given);
  const auto [out, ends] = recurrence_of(Rows(given), given).forward();
  return {out.to(given.q.scalar_type()), ends};
}

detail::DeltaGradients backward(const TensorOrNone& grad_out, const TensorOrNone& grad_ends,
                                const GatedDeltaRule& given) {
  detail::check_gated_delta_rule(given);
  const Rows rows(given);
  const at::Tensor grad = grad_out.defined() ? grad_out.to(given.g.scalar_type()) : at::Tensor();
  const detail::RecurrenceInputs grads = recurrence_of(rows, given).backward(grad, grad_ends);
  const auto dtype = given.q.scalar_type();
  return {detail::unit_rows_backward(grads.q, rows.q).to(dtype),
          detail::unit_rows_backward(grads.k, rows.k).to(dtype),
          grads.v.to(dtype),
          grads.g,
          grads.beta,
          grads.contexts};
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  m.impl("gated_delta_rule", detail::kKernel<&forward>);
  m.impl("gated_delta_rule_backward", detail::kKernel<&backward>);
}

}  // namespace espalier
