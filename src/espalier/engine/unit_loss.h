// SPDX-License-Identifier: Apache-2.0
// Losses of wider scope than a token over several micro-batches.
// Such a loss depends on the log-probabilities of a whole trajectory or group, which may be in many
// micro-batches. They are gathered from the forward passes. Before the backward pass of a micro-batch, all
// units with terms in it are evaluated, and the gradients of its terms seed the backward pass. If the order
// of the plan does not provide the terms of a unit in time, a separate pass computes all log-probabilities
// first (needs_logprob_pass).
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
  /// `step` and `loss` must outlive this object.
  UnitLoss(const Step& step, const Loss& loss, at::Device device);

  /// Whether all log-probabilities must be added before gradients() is called.
  bool needs_logprob_pass() const { return needs_logprob_pass_; }

  /// Adds the log-probabilities [M] (float64) of the terms of a batch.
  void add(const Batch& batch, const at::Tensor& logprobs);

  /// Loss and metrics of a part, summed over the units evaluated by one call.
  struct PartValue {
    int64_t part;
    ObjectiveValue value;
  };
  /// Evaluates the units with terms in micro-batch `m` that have not been evaluated yet. The ranks of
  /// Step::context_group evaluate them together, and the first has their values.
  std::vector<PartValue> evaluate(int64_t m) { return evaluate_units(units_.units_of_micro_batch[m]); }
  /// Evaluates all units that have not been evaluated yet. All log-probabilities must have been added.
  std::vector<PartValue> evaluate_all();

  /// Gradients [M] (float64) of the loss with respect to the log-probabilities of the terms of a batch whose
  /// units have been evaluated.
  at::Tensor gradients(const Batch& batch) const;

  /// The number of units with terms of a part of the loss, of which this rank has the values.
  int64_t num_units(int64_t part) const;

 private:
  int64_t part_of_unit(int64_t unit) const {
    return loss_.part_of(step_.rows[units_.trajectories[unit].front()]);
  }
  /// Evaluates those that have not been evaluated yet.
  std::vector<PartValue> evaluate_units(const std::vector<int64_t>& units);
  ObjectiveValue evaluate_part(int64_t part, const std::vector<int64_t>& units);

  const Step& step_;
  const Loss& loss_;
  const Group& group_;
  at::Device device_;
  LossUnits units_;
  bool needs_logprob_pass_;
  TermTensors terms_;     // all terms of the step, on the device
  at::Tensor logprobs_;   // [all terms] float64
  at::Tensor gradients_;  // [all terms] float64
  std::vector<bool> evaluated_;
};

/// nullopt unless the loss is_wide().
std::optional<UnitLoss> make_unit_loss(const Step& step, const Loss& loss, at::Device device);

}  // namespace espalier
