// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/sft.h"

#include <ATen/ATen.h>

namespace espalier {

ObjectiveValue Sft::value(const at::Tensor& logprobs, const TermTensors& terms, const TermUnits&) const {
  return {.loss = -(terms.coefficient * logprobs).sum(), .metrics = {}};
}

at::Tensor Sft::reference(std::span<const ReferenceTrajectory> group) const {
  std::vector<at::Tensor> addends;
  for (const ReferenceTrajectory& trajectory : group)
    addends.push_back(trajectory.terms.coefficient * -trajectory.logprobs);
  return at::cat(addends);
}

TermBytes Sft::term_bytes() const {
  // Running: the log-probability and its product with the coefficient; or their gradients.
  return {.batch = kTermIndexBytes + kTermRealBytes, .graph = 0, .running = 2 * kTermRealBytes};
}

}  // namespace espalier
