// SPDX-License-Identifier: Apache-2.0
// Losses of a scope wider than a token, on trees that are cut.
// Such a loss is evaluated on the log-probabilities of a whole trajectory or group, which may come from many
// micro-batches. They are gathered as the forward passes produce them. When a micro-batch is about to run
// backward, all units with terms in it are evaluated, and the gradients of its terms seed the backward pass.
// So the gradients of micro-batches still add up. Where the order of the plan does not know a unit's terms in
// time, all log-probabilities are computed in a pass before (needs_logprob_pass).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "espalier/engine/batch.h"
#include "espalier/engine/order.h"

namespace espalier {

class UnitLoss {
 public:
  /// Everything must outlive this object.
  UnitLoss(const Step& step, const Loss& loss, at::Device device);

  /// Whether all log-probabilities have to be added before the first gradients are asked for.
  bool needs_logprob_pass() const { return needs_logprob_pass_; }

  /// Log-probabilities [M] (float64) of the terms of a batch.
  void add(const Batch& batch, const at::Tensor& logprobs);

  /// What the units of a part that were evaluated at a time sum up to.
  struct PartValue {
    int64_t part;
    ObjectiveValue value;
  };
  /// Evaluates the units with terms in micro-batch `m` that have not been evaluated yet.
  std::vector<PartValue> evaluate(int64_t m);
  /// All units that have not been evaluated yet, when all log-probabilities have been added.
  std::vector<PartValue> evaluate_all();

  /// Gradients [M] (float64) of the loss with respect to the log-probabilities of the terms of a batch whose
  /// units have been evaluated.
  at::Tensor gradients(const Batch& batch) const;

  /// How many units of a part of the loss have terms.
  int64_t num_units(int64_t part) const;

 private:
  int64_t part_of_unit(int64_t unit) const;
  /// Those that have not been evaluated yet.
  std::vector<PartValue> evaluate_units(const std::vector<int64_t>& units);
  ObjectiveValue evaluate_part(int64_t part, const std::vector<int64_t>& units);

  const Step& step_;
  const Loss& loss_;
  at::Device device_;
  LossUnits units_;
  bool needs_logprob_pass_;
  TermTensors terms_;     // of all terms of the step, on the device
  at::Tensor logprobs_;   // [all terms] float64
  at::Tensor gradients_;  // [all terms] float64
  std::vector<bool> evaluated_;
};

/// Where some objective's scope is wider than a token.
std::optional<UnitLoss> make_unit_loss(const Step& step, const Loss& loss, at::Device device);

}  // namespace espalier
