// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/custom.h"

#include <ATen/ATen.h>

#include "espalier/base/check.h"

namespace espalier {

ObjectiveValue Custom::value(const at::Tensor& logprobs, const TermTensors&, const TermUnits&) const {
  const at::Tensor host = logprobs.detach().to(at::kCPU, at::kDouble).contiguous();
  const auto size = static_cast<size_t>(host.numel());
  const CustomValue value = function_({host.const_data_ptr<double>(), size});
  ESPALIER_CHECK(value.gradient.size() == size,
                 "objective: expected a gradient of {} log-probabilities, received one of {}", size,
                 value.gradient.size());
  const at::Tensor gradient = at::tensor(value.gradient, at::kDouble).to(logprobs.device());
  // logprobs - logprobs.detach() is 0: the value is the function's loss and the gradient is the function's.
  return {.loss = (gradient * (logprobs - logprobs.detach())).sum() + value.loss, .metrics = {}};
}

at::Tensor Custom::reference(std::span<const ReferenceTrajectory> group) const {
  std::vector<at::Tensor> logprobs;
  for (const ReferenceTrajectory& trajectory : group) logprobs.push_back(trajectory.logprobs);
  return value(at::cat(logprobs), {}, {}).loss.view({1});
}

TermBytes Custom::term_bytes() const {
  // Running: the log-probability, its difference, the gradient and their product.
  return {.batch = kTermIndexBytes + kTermRealBytes, .graph = 0, .running = 4 * kTermRealBytes};
}

}  // namespace espalier
