// SPDX-License-Identifier: Apache-2.0
// ssm_scan on the CPU: rows dt x are added to states as they are, with decays exp(dt A).
#include <ATen/ATen.h>
#include <torch/library.h>

#include "espalier/ops/chunk_scan/cpu.h"
#include "espalier/ops/ssm_scan/checks.h"

namespace espalier {
namespace {

using detail::SsmArguments;
using OptionalTensor = std::optional<at::Tensor>;

at::Tensor in_sums(const SsmArguments& given, const at::Tensor& rows) {
  return rows.to(given.dt.scalar_type());
}

detail::CpuRecurrence recurrence_of(const SsmArguments& given) {
  detail::check_ssm_scan(given);
  return {"ssm_scan",
          {.delta = false,
           .scale = 1,
           .q = in_sums(given, given.c),
           .k = in_sums(given, given.b),
           .v = in_sums(given, given.x) * given.dt.unsqueeze(-1),
           .g = given.dt * given.a,
           .beta = {},
           .contexts = given.states.value_or(at::Tensor())},
          {given.prev, given.ends, given.states ? given.states->size(0) : 0, given.chunk_size}};
}

detail::SsmResults forward(const SsmArguments& given) {
  auto [out, ends] = recurrence_of(given).forward();
  if (given.d) out.addcmul_(in_sums(given, given.x), given.d->unsqueeze(-1));
  return {out.to(given.x.scalar_type()), ends};
}

detail::SsmGradients backward(const OptionalTensor& grad_out, const OptionalTensor& grad_ends,
                              const SsmArguments& given) {
  const detail::CpuRecurrence recurrence = recurrence_of(given);
  const OptionalTensor grad = grad_out ? OptionalTensor(in_sums(given, *grad_out)) : std::nullopt;
  const detail::RecurrenceInputs grads = recurrence.backward(grad, grad_ends);
  return detail::ssm_gradients(given, grad.value_or(at::zeros_like(grads.v)),
                               {grads.v, grads.g, grads.k, grads.q, grads.contexts});
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  m.impl("ssm_scan", &detail::ssm_scan_of<&forward>);
  m.impl("ssm_scan_backward", &detail::ssm_scan_backward_of<&backward>);
}

}  // namespace espalier
