// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule on the CPU.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>

#include "espalier/ops/chunk_scan/cpu.h"
#include "espalier/ops/gated_delta/checks.h"

namespace espalier {
namespace {

using detail::DeltaArguments;
using OptionalTensor = std::optional<at::Tensor>;

/// Rows in the dtype of sums.
struct Rows {
  detail::UnitRows q, k;
  at::Tensor v;

  explicit Rows(const DeltaArguments& given)
      : q(detail::unit_rows(given.q.to(given.g.scalar_type()))),
        k(detail::unit_rows(given.k.to(given.g.scalar_type()))),
        v(given.v.to(given.g.scalar_type())) {}
};

detail::CpuRecurrence recurrence_of(const Rows& rows, const DeltaArguments& given) {
  return {"gated_delta_rule",
          {.delta = true,
           .scale = std::pow(static_cast<double>(given.q.size(2)), -0.5),
           .q = rows.q.unit,
           .k = rows.k.unit,
           .v = rows.v,
           .g = given.g,
           .beta = given.beta,
           .contexts = given.states.value_or(at::Tensor())},
          {given.prev, given.ends, given.states ? given.states->size(0) : 0, given.chunk_size}};
}

detail::DeltaResults forward(const DeltaArguments& given) {
  detail::check_gated_delta_rule(given);
  const auto [out, ends] = recurrence_of(Rows(given), given).forward();
  return {out.to(given.q.scalar_type()), ends};
}

detail::DeltaGradients backward(const OptionalTensor& grad_out, const OptionalTensor& grad_ends,
                                const DeltaArguments& given) {
  detail::check_gated_delta_rule(given);
  const Rows rows(given);
  const OptionalTensor grad = grad_out ? OptionalTensor(grad_out->to(given.g.scalar_type())) : std::nullopt;
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
  m.impl("gated_delta_rule", &detail::delta_rule_of<&forward>);
  m.impl("gated_delta_rule_backward", &detail::delta_rule_backward_of<&backward>);
}

}  // namespace espalier
