// SPDX-License-Identifier: Apache-2.0
// An objective computed by a function of the caller.
#pragma once

#include <span>
#include <utility>

#include "espalier/objective/custom_function.h"
#include "espalier/objective/objective.h"

namespace espalier {

/// The loss is what the function returns; loss weights and normalisers are not applied.
class Custom : public Objective {
 public:
  Custom(const ObjectiveOptions& options, CustomFunction function)
      : Objective(options), function_(std::move(function)) {}
  std::string_view name() const override { return "custom"; }
  Scope scope() const override { return Scope::kStep; }
  /// Throws InputError if the function returns a gradient of another size.
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override;
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override;
  TermBytes term_bytes() const override;
  /// The function may compare them with any recorded ones.
  bool is_at_row_temperature() const override { return true; }

 private:
  CustomFunction function_;
};

}  // namespace espalier
