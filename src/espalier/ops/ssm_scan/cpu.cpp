// SPDX-License-Identifier: Apache-2.0
// ssm_scan on the CPU: rows dt x are added to states without the delta rule, with decays exp(dt A).
#include <ATen/ATen.h>

#include "espalier/ops/chunk_scan/cpu.h"
#include "espalier/ops/operator.h"
#include "espalier/ops/ssm_scan/arguments.h"

namespace espalier {
namespace {

at::Tensor in_sums(const SsmScan& given, const at::Tensor& rows) {
  return rows.to(given.dt.scalar_type());
}

detail::CpuRecurrence recurrence_of(const SsmScan& given) {
  detail::check_ssm_scan(given);
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

detail::SsmResults forward(const SsmScan& given) {
  auto [out, ends] = recurrence_of(given).forward();
  if (given.d.defined()) out.addcmul_(in_sums(given, given.x), given.d.unsqueeze(-1));
  return {out.to(given.x.scalar_type()), ends};
}

detail::SsmGradients backward(const TensorOrNone& grad_out, const TensorOrNone& grad_ends,
                              const SsmScan& given) {
  const detail::CpuRecurrence recurrence = recurrence_of(given);
  const at::Tensor grad = grad_out.defined() ? in_sums(given, grad_out) : at::Tensor();
  const detail::RecurrenceInputs grads = recurrence.backward(grad, grad_ends);
  return detail::ssm_gradients(given, grad.defined() ? grad : at::zeros_like(grads.v),
                               {grads.v, grads.g, grads.k, grads.q, grads.contexts});
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  m.impl("ssm_scan", detail::kKernel<&forward>);
  m.impl("ssm_scan_backward", detail::kKernel<&backward>);
}

}  // namespace espalier
