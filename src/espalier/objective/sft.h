// SPDX-License-Identifier: Apache-2.0
// Supervised fine-tuning: cross-entropy of the tokens that carry loss.
//   loss = sum over the terms of coefficient * -log p
#pragma once

#include "espalier/objective/objective.h"

namespace espalier {

class Sft : public Objective {
 public:
  using Objective::Objective;
  std::string_view name() const override { return "sft"; }
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override;
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override;
  TermBytes term_bytes() const override;
};

}  // namespace espalier
